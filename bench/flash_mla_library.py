"""`flash_mla` over FlashMLA's compiled operators alone, for a machine that has these but not the package.

Inference engines ship the operators as a shared library of their own, namespace `_flashmla_C`. FLASHMLA_SO names it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

VARIABLE = "FLASHMLA_SO"


class SchedMeta:
    """Which programs attend to which keys: made by the first call that uses it, for the lengths of that call."""

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def provide() -> None:
    """Make `import flash_mla` work, where FLASHMLA_SO names a library and no package of that name is installed."""
    path = os.environ.get(VARIABLE)
    if not path or "flash_mla" in sys.modules or find_spec("flash_mla") is not None:
        return
    torch.ops.load_library(path)
    module = ModuleType("flash_mla", __doc__)
    module.__spec__ = ModuleSpec("flash_mla", None)
    vars(module).update(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
    sys.modules["flash_mla"] = module


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[SchedMeta, None]:
    """An empty schedule; arguments are those of older releases, which made it here."""
    return SchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, 576] over k_cache [P, 64, 1, 576]: output [B, Sq, H, 512] and LSE [B, H, Sq], natural log."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows = (q, k_cache, head_dim_v, cache_seqlens, block_table)
    out, lse, *made = _operator()(*rows, scale, causal, *tile_scheduler_metadata.tensors, None)
    tile_scheduler_metadata.tensors = tuple(made)
    return out, lse


def _operator() -> Any:
    return torch.ops._flashmla_C.dense_decode_fwd
