"""Attention: the drop-in layer. It writes new keys and values to the paged cache and attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from .. import env
from ..backends.base import AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from ..backends.hybrid import make_builder, make_impl
from ..backends.selector import Selection, current_request, select_backend
from ..call import AttentionCall
from ..errors import InvalidInputError
from ..formats.base import LayerCache
from ..formats.per_layer import KVCacheDtype
from ..spec import AttentionSpec, AttentionType, GraphLevel, Mask, Scale
from ..spec.scales import LayerScales, require_given_scales
from ..step.metadata import CommonAttentionMetadata
from .base import PagedLayer
from .plan_step import Key, StepMetadata
from .replay import layout_of, run_and_keep, split_heads
from .validation import check_call, check_contents

# Equal keys are one object, which a lookup recognises without a comparison; a kind is a key that costs nothing to hash.
_KINDS: dict[Key, tuple[Key, object]] = {}


class Attention(PagedLayer):
    """Attention of one model layer over a paged KV cache, for inference: no gradient flows through it.

    Queries and keys come rotated; the caller keeps block tables and lengths (see `CommonAttentionMetadata`). Who
    serves it is decided when the layer is built, or moved: argument `backend`, `use_backend()`, PAGEDATTN_BACKEND, or
    the measured priority. `layer.selection.describe()` says who and why.

    Args:
        sliding_window: keys kept, the token's own included; causal: None is as the attention type says. mask: both, and
            whatever else a `Mask` has, in their place. softcap: cap * tanh(logit / cap).
        alibi_slopes, sinks: [num_heads]; a sink is one more logit per head that joins the denominator.
        kv_cache_dtype: how the cache stores, by name or as a `KVCacheDtype` that skips no layers.
        block_size, cache_layout: of the cache; None lets the backend choose (`layer.selection.block_size`).
        k_scale, v_scale: of an fp8 cache, stored = value / scale: floats, or float32 tensors of [1] or [Hkv]. Those of
            a checkpoint (`k_scale`, `v_scale`) replace them.
        kv_scale: "tensor", "head" or "float" where an fp8 cache's scales come with each call instead.
        clean_cache: unused slots never hold NaN or Inf, see `PagedKVCache.zero_blocks`; some backends need that.
        deterministic: a token's output has the same bits in any batch and any chunking.
        graph_level: what a CUDA graph is to capture of this layer; backends that cannot are refused.
        kv_group: whose block table this layer uses, see `PagedKVCache.group_of`.
        dtype, device: of queries, keys and values; follow `.to()` like a parameter's.

    Raises:
        UnsupportedError: the backend asked for, or every backend, cannot serve this; lists the reasons.
        InvalidInputError: values that contradict each other, or an unknown backend.
    """

    sinks: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        sinks: torch.Tensor | Sequence[float] | None = None,
        head_dim_v: int | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        causal: bool | None = None,
        mask: Mask | None = None,
        kv_cache_dtype: str | KVCacheDtype = "auto",
        block_size: int | None = None,
        cache_layout: str = "NHD",
        k_scale: Scale = None,
        v_scale: Scale = None,
        kv_scale: str | None = None,
        clean_cache: bool = False,
        deterministic: bool = False,
        graph_level: GraphLevel = GraphLevel.NEVER,
        backend: str | None = None,
        kv_group: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._kv_group = kv_group
        stored = KVCacheDtype.of(kv_cache_dtype).of_one_layer()
        self._base = AttentionSpec(
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            head_dim_v=head_dim_v,
            scale=scale,
            mask=_mask(mask, causal, sliding_window),
            softcap=softcap,
            has_alibi=alibi_slopes is not None,
            has_sinks=sinks is not None,
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            attn_type=attn_type,
            kv_cache_dtype=stored,
            block_size=block_size,
            cache_layout=cache_layout,
            clean_cache=clean_cache,
            deterministic=deterministic,
            graph_level=graph_level,
        )
        self._scales = LayerScales.given(k_scale, v_scale, kv_scale, stored, self._base.kv_heads)
        self._request = current_request(backend)
        # Slopes are values, not parameters: they exist where the layer is built on the meta device too.
        slopes = _values(alibi_slopes, torch.float32, "cpu")
        self._slope_values = None if slopes is None else slopes.float()
        logits = _values(sinks, dtype, device)
        for name, values in (("alibi_slopes", self._slope_values), ("sinks", logits)):
            if values is not None and tuple(values.shape) != (num_heads,):
                raise InvalidInputError(name, f"[{num_heads}], one per query head", list(values.shape))
        if isinstance(logits, nn.Parameter) or logits is None:
            self.sinks = logits
        else:
            self.register_buffer("sinks", logits, persistent=False)
        self._anchor_to(dtype, device)
        self._resolve()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        found = [state_dict.pop(f"{prefix}{name}", None) for name in ("k_scale", "v_scale")]
        if any(scale is not None for scale in found):
            require_given_scales(self._base.kv_cache_dtype)
            self._scales = self._scales.loaded(*found, kv_heads=self._base.kv_heads)
            self._resolve()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": scale for name, scale in self._scales.saved().items()})

    def _resolve(self) -> None:
        """Choose the backend for the dtype and device that the layer has now."""
        device, spec = self._anchor.device, self._spec_here()
        stores_scaled = spec.format.takes_scales
        selection = select_backend(spec.replace(kv_scale=self._scales.kind), self._request)
        self.selection: Selection = replace(selection, scales=self._scales.source if stores_scaled else "")
        self._impl: AttentionImpl = make_impl(selection.prefill, selection.decode, selection.spec)
        self._builder: AttentionMetadataBuilder | None = None
        self._placed_scales = self._scales.to(device)
        key = (self._kv_group, self.selection.spec, self.selection.served_by)
        self._plan_key, self._kind = _KINDS.setdefault(key, (key, object()))
        # Slopes stay float32, whatever the layer is cast to, and survive a stay on the meta device.
        self._slopes = None if self._slope_values is None else self._slope_values.to(device)

    @property
    def kv_scales(self) -> tuple[Scale, Scale]:
        """k_scale and v_scale of this layer, tensors on its device; None is 1, or that they come with each call."""
        return self._placed_scales.key, self._placed_scales.value

    def set_kv_scales(self, k_scale: Scale, v_scale: Scale, source: str) -> None:
        """Give the layer scales after it was built, as `k_scale` and `v_scale` would; may choose another backend.

        Args:
            source: where they are from, for `selection.describe()`.

        Raises:
            InvalidInputError: the layer's format takes no scales, or not such ones.
            UnsupportedError: no backend serves them.
        """
        given = LayerScales.given(k_scale, v_scale, None, self._base.kv_cache_dtype, self._base.kv_heads)
        self._scales = replace(given, source=source)
        self._resolve()

    @property
    def builder(self) -> AttentionMetadataBuilder:
        """The metadata builder of this layer's backend, made on first use."""
        if self._builder is None:
            pair = self.selection.prefill, self.selection.decode
            self._builder = make_builder(*pair, self.spec, self._anchor.device)
        return self._builder

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: LayerCache | None,
        metadata: StepMetadata | AttentionMetadata | CommonAttentionMetadata,
        out: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend.

        Args:
            query: [T, Hq, D] or [T, Hq * D]. key: [T', Hkv, D] or flat, None where nothing is to be written (a shared
                cache, cross attention after its first step). value: [T', Hkv, Dv] or flat.
            kv_cache: this layer's cache; None attends to `key` and `value` themselves, packed, writing nothing.
            metadata: of `plan_step`, of `build`, or a CommonAttentionMetadata, which is built at once (slower).
            out: [T, Hq, Dv] to write to. k_scale, v_scale: where the layer was built with `kv_scale`.

        Returns:
            [T, Hq, Dv], or [T, Hq * Dv] for a flat query.

        Raises:
            InvalidInputError: shapes, dtypes or devices that do not fit (PAGEDATTN_CHECK=1), or contents (2).
        """
        built = self._metadata(metadata)
        # Keys that come with the call are not quantised.
        scales = self._placed_scales.of_call(k_scale, v_scale) if kv_cache is not None else (None, None)
        call = AttentionCall(query, kv_cache, key, value, out, None, self.sinks, self._slopes, *scales)
        plan = None if kv_cache is None or torch.compiler.is_dynamo_compiling() else built.repeated
        if (
            key is not None and getattr(kv_cache, "recent", None) is not None
        ):  # a seal follows, of which it has no launch
            plan = None
        if plan is None:
            return self._call(call, built, None)
        layout = layout_of(self._kind, call)
        known = plan.calls.get(layout)
        if known is not None:
            result = known.again(self._impl, call, built.common.slot_mapping)
            if result is not None:
                return result
        return self._call(call, built, layout if plan.num_launches else None)

    @torch.no_grad()
    def seal(self, kv_cache: LayerCache, metadata: StepMetadata | AttentionMetadata) -> None:
        """Encode the blocks that a step's rows filled, where the caller wrote these to `kv_cache.recent` itself, at the
        slots of the step's metadata, and calls the layer without keys. Nothing of formats that store each token.

        Before the layer's call; `seal_layers` does it for all layers after their calls, of steps that allow it."""
        self._impl.seal(kv_cache, self._metadata(metadata))

    @torch.no_grad()
    def _call(self, call: AttentionCall, built: AttentionMetadata, layout: object) -> torch.Tensor:
        """With all checks; kept under `layout` where it can be made again."""
        spec, given, key, value, out = self.spec, call.query, call.key, call.value, call.out
        call = call._replace(
            query=split_heads(given, spec.num_heads, spec.head_dim),
            key=None if key is None else split_heads(key, spec.kv_heads, spec.head_dim),
            value=None if value is None else split_heads(value, spec.kv_heads, spec.value_dim),
            out=None if out is None else split_heads(out, spec.num_heads, spec.value_dim),
        )
        level = env.check_level()
        if level:
            check_call(spec, call, built.common)
        if level == 2:
            check_contents(spec, call, built.common)
        if layout is not None and level < 2:
            result = run_and_keep(self._impl, call, built, given, layout)
        else:
            if call.kv_cache is not None and call.key is not None:
                slots = built.common.slot_mapping
                self._impl.write_kv(call.key, call.value, call.kv_cache, slots, call.k_scale, call.v_scale)
                self._impl.seal(call.kv_cache, built)
            result = self._impl.forward(call, built)
        return result.flatten(1) if given.dim() == 2 else result

    def _metadata(self, metadata: StepMetadata | AttentionMetadata | CommonAttentionMetadata) -> AttentionMetadata:
        if isinstance(metadata, StepMetadata):
            return metadata.of(self.plan_key)
        if isinstance(metadata, CommonAttentionMetadata):
            return self.build(metadata)
        if not isinstance(metadata, AttentionMetadata):
            expected = "of plan_step or of build, or a CommonAttentionMetadata"
            raise InvalidInputError("metadata", expected, type(metadata).__name__)
        return metadata

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.num_heads}/{spec.kv_heads} heads of {spec.head_dim}, backend={self.selection.name}"


def _mask(mask: Mask | None, causal: bool | None, sliding_window: int | None) -> Mask:
    """The mask given, or one of the plain arguments."""
    if mask is None:
        return Mask(causal, sliding_window)
    if causal is not None or sliding_window is not None:
        raise InvalidInputError("mask", "given alone", "causal or sliding_window beside it", "set them in the mask")
    return mask


def _values(
    given: torch.Tensor | Sequence[float] | None, dtype: torch.dtype | None, device: torch.device | str | None
) -> torch.Tensor | None:
    """A tensor as it is; numbers as one."""
    if given is None or isinstance(given, torch.Tensor):
        return given
    return torch.tensor(given, dtype=dtype or torch.get_default_dtype(), device=device)
