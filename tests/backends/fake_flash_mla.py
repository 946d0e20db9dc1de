"""A stand-in for FlashMLA's `flash_mla`: signatures and conventions, computed by definition on any device.

A schedule is made by the first call that uses it. Later calls are checked for the shapes of that one and attend to as
many keys as its sequences had, whatever the lengths are by then. The LSE of a row without keys is +inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from pagedattn import Mask
from pagedattn.testing import attention_oracle

calls = 0
schedules = 0  # that were made, by the device


@dataclass
class FlashMLASchedMeta:
    config: tuple[object, ...] | None = None
    lengths: torch.Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    global calls, schedules
    calls += 1
    _check(q, k_cache, block_table, cache_seqlens, head_dim_v)
    assert softmax_scale is not None, "576 ** -0.5 is the scale of no model"
    assert num_splits is None and not is_fp8_kvcache and indices is attn_sink is extra_k_cache is None
    made, config = tile_scheduler_metadata, (*q.shape[:3], *k_cache.shape[1:3], causal)
    assert isinstance(made, FlashMLASchedMeta) and made.config in (None, config), "shapes of another call"
    if made.config is None:
        made.config, made.lengths = config, cache_seqlens.clone()
        schedules += 1
    assert made.lengths is not None
    outs, lses = [], []
    for query, row, length in zip(q, block_table, made.lengths.tolist(), strict=True):
        keys = k_cache[row[: -(-length // 64)].long()].flatten(0, 1)[:length]
        out, lse = attention_oracle(query, keys, keys[..., :512], scale=softmax_scale, mask=Mask(causal=causal))
        outs.append(out.to(q.dtype))
        lses.append(lse.float().T)
    lse = torch.stack(lses)
    return torch.stack(outs), lse.masked_fill(lse == -math.inf, math.inf)


def _check(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int) -> None:
    """What the operator refuses, and what it would read wrongly."""
    assert q.dim() == k_cache.dim() == 4 and q.shape[1] > 0 and head_dim_v == 512
    assert q.shape[3] == k_cache.shape[3] == 576 and k_cache.shape[1:3] == (64, 1)
    assert q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(3) == k_cache.stride(3) == 1 and block_table.stride(1) == 1
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert len(q) == len(block_table) == len(cache_seqlens) > 0 and block_table.shape[1] > 0
    assert cache_seqlens.is_contiguous()


def _module() -> ModuleType:
    module = ModuleType("flash_mla")
    module.__spec__ = ModuleSpec("flash_mla", None)
    vars(module).update(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
    return module


MODULE = _module()
