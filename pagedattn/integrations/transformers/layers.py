"""The `pagedattn.Attention` and the cache of each layer of a transformers model, by what it was seen to ask for."""

from __future__ import annotations

from typing import Any

import torch

from ... import Attention
from .probe import ProbedLayer


def make_attention(layer: ProbedLayer, model: Any, **options: Any) -> Attention:
    """Attention for one probed layer, on the model's device and in its dtype; `options` are those of `Attention`."""
    call = layer.call
    return Attention(
        call.num_heads,
        call.head_dim,
        call.num_kv_heads,
        call.scale,
        head_dim_v=call.head_dim_v,
        sliding_window=layer.window,
        softcap=call.softcap,
        sinks=layer.sinks,
        dtype=model.dtype,
        device=model.device,
        **options,
    )


def kept_per_token(layer: ProbedLayer, dtype: torch.dtype, block_size: int, kv_cache_dtype: str) -> dict[str, Any]:
    """What one probed layer keeps, as fields of a `KVCacheSpec`."""
    call = layer.call
    heads = {"num_kv_heads": call.num_kv_heads, "head_dim": call.head_dim, "head_dim_v": call.head_dim_v}
    return {**heads, "dtype": dtype, "block_size": block_size, "kv_cache_dtype": kv_cache_dtype}
