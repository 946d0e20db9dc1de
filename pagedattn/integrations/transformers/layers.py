"""The `pagedattn.Attention` of each layer of a transformers model, made of what the layer was seen to ask for."""

from __future__ import annotations

from typing import Any

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
