"""Scales of fp8 caches: of which kind they are, and where a layer's came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..errors import InvalidInputError
from ..formats.base import takes_no_scales
from ..formats.fp8.format import POSITIVE_SCALE, is_scale
from ..formats.registry import format_of
from .attention import Scale

_ONE_KIND = "give two floats, or two tensors of as many elements"
_LOADED = "the checkpoint"
_UNKNOWN = "1.0: neither the layer, its checkpoint nor the call gives any"


def scale_kind(k_scale: Scale, v_scale: Scale) -> str:
    """What `AttentionSpec.kv_scale` says of a pair: none, float, tensor (one element) or head.

    Raises:
        InvalidInputError: a pair of two kinds (None goes with any).
    """
    kinds = {_kind(scale) for scale in (k_scale, v_scale) if scale is not None}
    if len(kinds) > 1:
        raise InvalidInputError("k_scale and v_scale", "of one kind", " and ".join(sorted(kinds)), _ONE_KIND)
    return kinds.pop() if kinds else "none"


def require_given_scales(kv_cache_dtype: str) -> None:
    """Raise InvalidInputError where scales come for a cache that has none, or that computes them itself."""
    if not format_of(kv_cache_dtype).takes_scales:
        raise takes_no_scales("k_scale, v_scale, kv_scale", kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class LayerScales:
    """A layer's scales and their source, as the selection reports it; `announced` come with each call instead."""

    key: Scale = None
    value: Scale = None
    source: str = _UNKNOWN
    announced: str | None = None

    @classmethod
    def given(cls, key: Scale, value: Scale, announced: str | None, kv_cache_dtype: str, kv_heads: int) -> LayerScales:
        """Of a layer's arguments.

        Raises:
            InvalidInputError: scales for a cache that has none, both given and announced, or no such numbers.
        """
        any_given = key is not None or value is not None
        if any_given or announced:
            require_given_scales(kv_cache_dtype)
        if any_given and announced:
            remedy = "leave kv_scale out, or k_scale and v_scale"
            raise InvalidInputError("kv_scale", "None where the layer has scales of its own", repr(announced), remedy)
        source = "the call" if announced else "the layer's arguments" if any_given else _UNKNOWN
        return cls(_given("k_scale", key, kv_heads), _given("v_scale", value, kv_heads), source, announced)

    @property
    def kind(self) -> str:
        """For `AttentionSpec.kv_scale`."""
        return self.announced or scale_kind(self.key, self.value)

    def loaded(self, key: torch.Tensor | None, value: torch.Tensor | None, kv_heads: int) -> LayerScales:
        """With what a checkpoint (or a shard of one) holds; one element becomes a host float, which every backend
        serves, unless the other scale has one per head.

        Raises:
            InvalidInputError: of another number of heads, or no scale at all.
        """
        pair = [
            old if new is None else _given(name, new.item() if new.numel() == 1 else new, kv_heads)
            for name, old, new in (("k_scale", self.key, key), ("v_scale", self.value, value))
        ]
        shape = next((x.shape for x in pair if isinstance(x, torch.Tensor)), None)
        if shape is not None:
            pair = [_tensor(x).expand(shape).contiguous() if isinstance(x, float) else x for x in pair]
        return replace(self, key=pair[0], value=pair[1], source=_LOADED, announced=None)

    def saved(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of the layer keeps: scales that came from one."""
        pair = {"k_scale": self.key, "v_scale": self.value} if self.source == _LOADED else {}
        return {name: _tensor(x) for name, x in pair.items() if x is not None}

    def to(self, device: torch.device) -> LayerScales:
        """With tensors on `device`."""
        pair = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (self.key, self.value)]
        return replace(self, key=pair[0], value=pair[1])

    def of_call(self, key: Scale, value: Scale) -> tuple[Scale, Scale]:
        """The scales to use in a call that was given these.

        Raises:
            InvalidInputError: announced and not given, or the other way round, or of another kind.
        """
        if key is None and value is None and self.announced is None:
            return self.key, self.value
        kind = scale_kind(key, value) if key is not None and value is not None else "none"
        if kind != self.announced and (kind, self.announced) != ("tensor", "head"):  # one element serves every head
            expected = f"of the kind announced, kv_scale={self.announced!r}"
            missing = [name for name, scale in (("k_scale", key), ("v_scale", value)) if scale is None]
            got = f"no {' and no '.join(missing)}" if missing else repr(kind)
            remedy = "pass both with each call" if self.announced else "build the layer with kv_scale= for it"
            raise InvalidInputError("k_scale and v_scale", expected, got, remedy)
        return key, value


def _kind(scale: float | torch.Tensor) -> str:
    if not isinstance(scale, torch.Tensor):
        return "float"
    return "tensor" if scale.numel() == 1 else "head"


def _given(name: str, scale: Scale, kv_heads: int) -> Scale:
    """A scale as the layer keeps it; what a tensor on a device holds is not looked at, which would wait for it."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if scale.numel() not in (1, kv_heads):
            expected = f"of 1 or {kv_heads} elements, one per KV head"
            raise InvalidInputError(name, expected, list(scale.shape), "give this layer's heads only")
        if scale.device.type == "cpu":
            check_elements(name, scale)
        return scale.float().reshape(-1)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not is_scale(scale):
        raise InvalidInputError(name, "a tensor, or a positive finite number", scale, POSITIVE_SCALE)
    return float(scale)


def check_elements(name: str, scale: torch.Tensor) -> None:
    """Raise InvalidInputError for an element that is no scale; waits for the tensor's device."""
    for index, element in enumerate(scale.reshape(-1).tolist()):
        if not is_scale(element):
            got = f"{element} at index {index}"
            raise InvalidInputError(name, "positive finite numbers", got, POSITIVE_SCALE)


def _tensor(scale: float | torch.Tensor) -> torch.Tensor:
    """Not on the default device, which may be one without memory."""
    return scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=torch.float32, device="cpu")
