"""`flash_mla` over FlashMLA's compiled operators alone, for a machine that has these but not the package.

Inference engines ship the operators as a shared library of their own, namespace `_flashmla_C`. FLASHMLA_SO names it.
Those over e4m3 rows are in another one, `_flashmla_extension_C`, which FLASHMLA_FP8_SO names.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from pagedattn.errors import UnsupportedError

VARIABLE, FP8_VARIABLE = "FLASHMLA_SO", "FLASHMLA_FP8_SO"


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


def fp8_operators() -> tuple[Any, Any]:
    """The schedule of a decode of e4m3 queries over e4m3 rows, and the decode.

    Raises:
        UnsupportedError: no library is named that has them.
    """
    path = os.environ.get(FP8_VARIABLE)
    if not path:
        raise UnsupportedError(f"it is measured over e4m3 rows where {FP8_VARIABLE} names FlashMLA's library of them")
    torch.ops.load_library(path)
    library = torch.ops._flashmla_extension_C
    return library.get_mla_decoding_metadata_dense_fp8, library.fwd_kvcache_mla_fp8


def _operator() -> Any:
    return torch.ops._flashmla_C.dense_decode_fwd
