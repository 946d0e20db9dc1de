"""The attention and the cache of each layer of a transformers model, by what it was seen to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import Attention, FullAttentionSpec, KVCacheDtype, MLAAttention, MLASpec, SlidingWindowSpec
from ...errors import InvalidInputError, UnsupportedError
from .probe import ProbedLayer


def keeps_rows(latent: bool | None, stored: KVCacheDtype, has_scales: bool = False) -> bool:
    """Whether a model of latent attention is to keep rows: as asked for, else where rows are stored in the cache's
    format and no scales of keys and values are given.

    Raises:
        InvalidInputError: rows are asked for, and such scales given, or `latent` is neither a bool nor None.
    """
    if latent is not None and not isinstance(latent, bool):
        raise InvalidInputError("latent", "a bool, or None", repr(latent))
    if latent and has_scales:
        expected, remedy = "None with latent=True, as they are of keys and values of every head", "leave latent out"
        raise InvalidInputError("kv_scales", expected, "a calibration", remedy)
    return MLASpec.stores(stored.name) and not has_scales if latent is None else latent


def with_formats(model: Any, layers: Sequence[ProbedLayer], stored: KVCacheDtype) -> list[tuple[ProbedLayer, str]]:
    """Each layer with the format of its cache.

    Raises:
        UnsupportedError: latent rows in a format that does not store them.
    """
    out = list(zip(layers, stored.of_layers(len(layers)), strict=True))
    other = next((name for layer, name in out if layer.latent is not None and not MLASpec.stores(name)), None)
    if other is not None:
        raise UnsupportedError(
            f"kv_cache_dtype={other!r} is not served for the latent rows of {type(model).__name__}, which are of the "
            'model\'s dtype or of e4m3; leave it at "auto", take "fp8", or "fp8_ds_mla" for rows of 512 + 64, or keep '
            "keys and values of every head, in that format and in many times the memory, by latent=False of enable or "
            "PackedModel"
        )
    return out


def make_attention(layer: ProbedLayer, model: Any, kv_cache_dtype: str, **options: Any) -> Attention | MLAAttention:
    """Attention for one probed layer, on the model's device and in its dtype; `options` are those of both classes.

    Raises:
        UnsupportedError: no backend serves it.
    """
    call, placed = layer.call, {"dtype": model.dtype, "device": model.device}
    if layer.latent is not None:
        sizes, asked = layer.latent, {"softcap": call.softcap, "kv_cache_dtype": kv_cache_dtype}
        return MLAAttention(call.num_heads, *sizes, scale=call.scale, **asked, **placed, **options)
    return Attention(
        call.num_heads,
        call.head_dim,
        call.num_kv_heads,
        call.scale,
        head_dim_v=call.head_dim_v,
        sliding_window=layer.window,
        softcap=call.softcap,
        sinks=layer.sinks,
        kv_cache_dtype=kv_cache_dtype,
        **placed,
        **options,
    )


def cache_spec(
    layer: ProbedLayer, dtype: torch.dtype, block_size: int, kv_cache_dtype: str
) -> FullAttentionSpec | SlidingWindowSpec | MLASpec:
    """What one probed layer keeps per token."""
    call, stored = layer.call, {"dtype": dtype, "block_size": block_size, "kv_cache_dtype": kv_cache_dtype}
    if layer.latent is not None:
        width = layer.latent.latent + layer.latent.rope
        return MLASpec(head_dim=width, latent_dim=layer.latent.latent, **stored)
    stored |= {"num_kv_heads": call.num_kv_heads, "head_dim": call.head_dim, "head_dim_v": call.head_dim_v}
    if layer.window is None:
        return FullAttentionSpec(**stored)
    return SlidingWindowSpec(sliding_window=layer.window, **stored)
