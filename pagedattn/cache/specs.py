"""KV cache specs: what one layer stores per token, and how layers of several kinds overlay one pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch

from ..errors import InvalidInputError, UnsupportedError
from ..spec import KV_CACHE_DTYPES

_STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def stored_dtype(kv_cache_dtype: str, model: torch.dtype) -> torch.dtype:
    """The element type of a cache of `kv_cache_dtype` in a model of dtype `model`."""
    return _STORED.get(kv_cache_dtype, model)


def stored_name(stored: torch.dtype, model: torch.dtype) -> str:
    """The kv_cache_dtype of a cache whose elements are `stored`, in a model of dtype `model`."""
    names = {dtype: name for name, dtype in _STORED.items() if name != "fp8"}
    return "auto" if stored == model else names.get(stored, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps per token. `kv_cache_dtype="auto"` stores `dtype`; int8 adds a float32 scale per head."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError(name, "at least 1", getattr(self, name))
        if self.head_dim_v is not None and self.head_dim_v < 1:
            raise InvalidInputError("head_dim_v", "at least 1, or None for head_dim", self.head_dim_v)
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidInputError("dtype", "a torch.dtype", repr(self.dtype), "kv_cache_dtype takes names")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidInputError("kv_cache_dtype", f"one of {', '.join(KV_CACHE_DTYPES)}", repr(self.kv_cache_dtype))

    @property
    def value_dim(self) -> int:
        """Head dimension of the stored values; 0 where values are a view of the keys."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def stored_dtype(self) -> torch.dtype:
        """The element type in memory."""
        return stored_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def scales_per_token(self) -> int:
        """How many float32 scales a token keeps beside its elements."""
        return 2 * self.num_kv_heads if self.kv_cache_dtype == "int8" else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer, scales included."""
        elements = self.num_kv_heads * (self.head_dim + self.value_dim)
        return elements * self.stored_dtype.itemsize + 4 * self.scales_per_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one layer: elements, then scales on their own alignment."""
        return self.scale_offset + 4 * self.scales_per_token * self.block_size

    @property
    def scale_offset(self) -> int:
        """Where in a block the scales begin, in bytes."""
        elements = self.num_kv_heads * (self.head_dim + self.value_dim) * self.stored_dtype.itemsize * self.block_size
        return -(-elements // 4) * 4 if self.scales_per_token else elements

    def window(self) -> int | None:
        """How many of the last tokens are ever read again; None is all."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """A layer that reads every earlier token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """A layer that reads the last `sliding_window` tokens only; older blocks may be released."""

    sliding_window: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if self.sliding_window < 1:
            raise InvalidInputError("sliding_window", "at least 1", self.sliding_window)

    def window(self) -> int | None:
        return self.sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec(KVCacheSpec):
    """A latent cache: one key row per token, whose first `latent_dim` elements are also the value."""

    latent_dim: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not 1 <= self.latent_dim <= self.head_dim:
            raise InvalidInputError("latent_dim", f"in 1..{self.head_dim}, as part of head_dim", self.latent_dim)

    @property
    def value_dim(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind that share a block table. `layers` are model layer indices, one per slab of the cache."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Cut a model's layers into groups that overlay one pool of equally large blocks.

    Layers of one kind are cut into groups of n, where n is the number of layers of the rarest kind (all layers where
    there is one kind), so that n slabs hold the whole model and a block id serves any group. Block sizes of kinds with
    fewer bytes per token are scaled up until bytes per block are equal. Source: the hybrid allocator of vLLM.

    Raises:
        InvalidInputError: no layers.
        UnsupportedError: kinds whose bytes per token are not in an integer ratio.
    """
    if not specs:
        raise InvalidInputError("specs", "one KVCacheSpec per layer", "an empty sequence")
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    per_group = min(map(len, kinds.values()))
    scaled = _equal_blocks(tuple(kinds))
    groups = []
    for spec, layers in kinds.items():
        cuts = range(0, len(layers), per_group)
        groups += [KVCacheGroup(scaled[spec], tuple(layers[cut : cut + per_group])) for cut in cuts]
    return tuple(groups)


def _equal_blocks(kinds: tuple[KVCacheSpec, ...]) -> dict[KVCacheSpec, KVCacheSpec]:
    largest = max(spec.bytes_per_block for spec in kinds)
    out = {}
    for spec in kinds:
        factor, rest = divmod(largest, spec.bytes_per_block)
        if rest:
            common = gcd(largest, spec.bytes_per_block)
            raise UnsupportedError(
                f"blocks of {spec} hold {spec.bytes_per_block} bytes, which does not divide the {largest} bytes of the "
                f"largest kind (common divisor {common}); choose block sizes with equal bytes or use separate caches"
            )
        out[spec] = replace(spec, block_size=spec.block_size * factor)
    return out
