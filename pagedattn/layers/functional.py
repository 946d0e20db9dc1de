"""paged_attention: the layer without a layer, for callers who hold their own parameters."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import env
from ..backends.base import AttentionImpl, AttentionMetadata
from ..backends.hybrid import make_builder, make_impl
from ..backends.selector import Request, current_request, select_backend
from ..call import AttentionCall, lse_dtype
from ..errors import InvalidInputError
from ..formats.base import LayerCache
from ..formats.registry import stored_as
from ..spec import AttentionSpec, AttentionType, Mask, Scale
from ..spec.scales import require_given_scales, scale_kind
from ..step.bounds import check_bounds
from ..step.metadata import CommonAttentionMetadata
from .validation import check_call, check_contents, check_kinds


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: LayerCache | None,
    common: CommonAttentionMetadata,
    *,
    scale: float | None = None,
    causal: bool | None = None,
    attn_type: AttentionType = AttentionType.DECODER,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    clean_cache: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write new keys and values (where there is a cache and `key`), then attend.

    Args:
        query: [T, Hq, D]. key, value: [T', Hkv, D] and [T', Hkv, Dv], or None to write nothing.
        kv_cache: a layer's cache, or None to attend to key and value themselves.
        k_scale, v_scale: of an fp8 cache: stored = value / scale. Floats, or float32 tensors of [1] or [Hkv].
        clean_cache: unused slots hold finite numbers, see `AttentionSpec`.

    Returns:
        output [T, Hq, Dv], and LSE [T, Hq] float32 (natural log) with return_lse, else None.

    Raises:
        InvalidInputError: neither cache nor keys, or wrong shapes. UnsupportedError: no backend serves this.
    """
    check_kinds(kv_cache, common)
    if query.dim() != 3:
        raise InvalidInputError("query", "[T, Hq, D]", list(query.shape))
    lse = torch.empty(query.shape[:2], dtype=lse_dtype(query.dtype), device=query.device) if return_lse else None
    scales = (None, None) if kv_cache is None else (k_scale, v_scale)  # keys that come with the call are not quantised
    call = AttentionCall(query, kv_cache, key, value, None, lse, sinks, alibi_slopes, *scales)
    keys, _ = call.keys_and_values
    gpu = query.device.type == "cuda"
    spec = AttentionSpec(
        num_heads=query.shape[1],
        head_dim=query.shape[2],
        num_kv_heads=keys.shape[-2],
        head_dim_v=_value_dim(call),
        dtype=query.dtype,
        device_type=query.device.type,
        capability=torch.cuda.get_device_capability(query.device) if gpu else None,
        block_size=None if kv_cache is None else kv_cache.block_size,
        attn_type=attn_type,
        scale=scale,
        mask=Mask(causal, sliding_window),
        softcap=softcap,
        has_sinks=sinks is not None,
        has_alibi=alibi_slopes is not None,
        needs_lse=return_lse,
        kv_cache_dtype="auto" if kv_cache is None else stored_as(kv_cache.format, keys.dtype).name,
        kv_scale="none" if kv_cache is None else scale_kind(k_scale, v_scale),
        clean_cache=clean_cache,
        deterministic=deterministic,
    )
    if level := env.check_level():
        check_bounds(common)
        check_call(spec, call, common)
        if level == 2:
            check_contents(spec, call, common)
    if spec.kv_scale != "none":
        require_given_scales(spec.kv_cache_dtype)
    impl, builder = _served(spec, query.device, current_request(backend), env.flash_attn_version())
    metadata = builder.build(common)
    _write(impl, call, metadata)
    return impl.forward(call, metadata), lse


def _write(impl: AttentionImpl, call: AttentionCall, metadata: AttentionMetadata) -> None:
    """New keys and values to the cache, where there is one and they are given."""
    if call.kv_cache is not None and call.key is not None:
        slots = metadata.common.slot_mapping
        impl.write_kv(call.key, call.value, call.kv_cache, slots, call.k_scale, call.v_scale)
        impl.seal(call.kv_cache, metadata)


def _value_dim(call: AttentionCall) -> int:
    """Dv; where no value comes, the cache says it, but for codes that are as wide as those of D elements."""
    (_, values), dim, cache = call.keys_and_values, call.query.shape[2], call.kv_cache
    if cache is not None and cache.recent is not None:
        return cache.recent.value.shape[-1]
    if cache is None or call.value is not None:
        return (values if call.value is None else call.value).shape[-1]
    codes = stored_as(cache.format, values.dtype).value.planes(dim, call.query.dtype)[0]
    return dim if codes.width == values.shape[-1] else values.shape[-1]


@lru_cache(maxsize=256)
def _served(spec: AttentionSpec, device: torch.device, request: Request, flash_attn: int | None):  # type: ignore[no-untyped-def]
    selection = select_backend(spec, request)
    pair = selection.prefill, selection.decode
    return make_impl(*pair, spec), make_builder(*pair, spec, device)
