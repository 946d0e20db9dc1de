"""KV cache specs: what one layer stores per token, and how layers of several kinds overlay one pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

import torch

from ..errors import InvalidInputError, UnsupportedError
from ..formats.base import CacheFormat, Plane
from ..formats.mla_rows.format import require_rows, stores_rows
from ..formats.registry import format_of

_ALIGNMENT = 16  # bytes, of planes where there are scales: codes and scales are then loaded by vectors of any size


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps per token. `kv_cache_dtype` names a format; "auto" stores `dtype`."""

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
        format_of(self.kv_cache_dtype).check_block_size(self.block_size)
        if self.format.latent_only and not isinstance(self, MLASpec):
            remedy = "take an MLASpec, or kv_cache_dtype='fp8'"
            raise InvalidInputError("kv_cache_dtype", "a format of keys and values", repr(self.kv_cache_dtype), remedy)

    @property
    def value_dim(self) -> int:
        """Head dimension of the stored values; 0 where values are a view of the keys."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def format(self) -> CacheFormat:
        """How keys and values are stored."""
        return format_of(self.kv_cache_dtype)

    @property
    def recent(self) -> KVCacheSpec:
        """Of the layer's second cache, where its format encodes whole blocks."""
        return replace(self, kv_cache_dtype="auto")

    @property
    def planes(self) -> dict[str, Plane]:
        """What a block holds, in this order, by the names of `LayerCache`; no value that is part of a key."""
        keys = self.format.key.planes(self.head_dim, self.dtype)
        values = self.format.value.planes(self.value_dim, self.dtype) if self.value_dim else ()
        sides = {"key": keys[:1], "value": values[:1], "key_scale": keys[1:], "value_scale": values[1:]}
        return {name: planes[0] for name, planes in sides.items() if planes}

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the planes of a block begin, in bytes, and where the last one ends."""
        planes, ends = self.planes, [0]
        alignment = _ALIGNMENT if "key_scale" in planes or "value_scale" in planes else 1
        for plane in planes.values():
            elements = plane.width * self.num_kv_heads * (1 if plane.per_block else self.block_size)
            ends.append(-(-(ends[-1] + elements * plane.dtype.itemsize) // alignment) * alignment)
        return tuple(ends)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each plane that has rows of tokens."""
        rows = [plane for plane in self.planes.values() if not plane.per_block]
        return tuple(plane.width * self.num_kv_heads * plane.dtype.itemsize for plane in rows)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one layer."""
        return self.offsets[-1]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in one layer, with its part of what a block keeps."""
        return self.bytes_per_block / self.block_size

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
    """A latent cache: one key row per token, whose first `latent_dim` elements are also the value.

    A block is one plane [S, 1, head_dim] of the model's dtype or of e4m3, or of bytes [S, 1, 656]; there is none of
    values.
    """

    num_kv_heads: int = 1
    latent_dim: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        require_rows(self.kv_cache_dtype)
        if self.num_kv_heads != 1:
            raise InvalidInputError("num_kv_heads", "1, as all heads read the same row", self.num_kv_heads)
        if not 1 <= self.latent_dim <= self.head_dim:
            raise InvalidInputError("latent_dim", f"in 1..{self.head_dim}, as part of head_dim", self.latent_dim)
        self.format.key.planes(self.head_dim, self.dtype)  # raises where the format has no rows of this size
        self.format.value.planes(self.latent_dim, self.dtype)

    @property
    def value_dim(self) -> int:
        return 0

    @staticmethod
    def stores(kv_cache_dtype: str) -> bool:
        """Whether latent rows are stored in this format: "auto", "fp8" or "fp8_ds_mla"."""
        return stores_rows(kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind that share a block table. `layers` are model layer indices, one per slab of the cache, or all
    in one slab where their formats differ. `spec`: of each, but for its format, which `specs` has."""

    specs: tuple[KVCacheSpec, ...]
    layers: tuple[int, ...]

    @property
    def spec(self) -> KVCacheSpec:
        """Of the first layer: how many tokens a block of each of them has, and of which window."""
        return self.specs[0]

    @property
    def is_mixed(self) -> bool:
        """Whether layers have different formats."""
        return len({*self.specs}) > 1

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer its slab, and the byte of the slab's blocks where it begins."""
        if not self.is_mixed:
            return tuple((slab, 0) for slab in range(len(self.layers)))
        return tuple((0, start) for start in self._starts[:-1])

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one slab."""
        return self._starts[-1] if self.is_mixed else self.spec.bytes_per_block

    @property
    def _starts(self) -> tuple[int, ...]:
        """Where each layer begins in a slab's block, where all are in one, and where the block ends: after whole slots
        of the layer, and after whole slots of every layer, since kernels that copy rows (TMA) see all blocks of a layer
        as one matrix."""
        slots, starts, end = [lcm(_ALIGNMENT, *spec.slot_bytes) for spec in self.specs], [], 0
        for slot, spec in zip(slots, self.specs, strict=True):
            starts.append(-(-end // slot) * slot)
            end = starts[-1] + spec.bytes_per_block
        whole = lcm(*slots)
        return (*starts, -(-end // whole) * whole)


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Cut a model's layers into groups that overlay one pool of equally large blocks.

    Layers of one kind are cut into groups of n, where n is the number of layers of the rarest kind (all layers where
    there is one kind), so that n slabs hold the whole model and a block id serves any group. Block sizes of kinds with
    fewer bytes per token are scaled up until bytes per block are equal. Source: the hybrid allocator of vLLM.
    Layers that differ in their format alone are one group.

    Raises:
        InvalidInputError: no layers.
        UnsupportedError: kinds whose bytes per token are not in an integer ratio.
    """
    if not specs:
        raise InvalidInputError("specs", "one KVCacheSpec per layer", "an empty sequence")
    if len({replace(spec, kv_cache_dtype="auto") for spec in specs}) == 1:
        return (KVCacheGroup(tuple(specs), tuple(range(len(specs)))),)
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    per_group = min(map(len, kinds.values()))
    scaled = _equal_blocks(tuple(kinds))
    groups = []
    for spec, layers in kinds.items():
        cuts = range(0, len(layers), per_group)
        for some in (tuple(layers[cut : cut + per_group]) for cut in cuts):
            groups.append(KVCacheGroup((scaled[spec],) * len(some), some))
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
                f"largest kind (common divisor {common}); {_remedy(kinds)}"
            )
        out[spec] = replace(spec, block_size=spec.block_size * factor)
        if out[spec].bytes_per_block != largest:
            raise UnsupportedError(
                f"no number of blocks of {spec} has {largest} bytes, as those of the largest kind; {_remedy(kinds)}"
            )
    return out


def _remedy(kinds: tuple[KVCacheSpec, ...]) -> str:
    if len({spec.format for spec in kinds}) > 1 and len({spec.window() for spec in kinds}) > 1:
        return "beside sliding windows all layers take one format: leave skip= out of kv_cache_dtype"
    return "choose block sizes with equal bytes or use separate caches"
