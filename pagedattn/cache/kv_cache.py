"""PagedKVCache: one allocation of blocks, and the views that each layer gets of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import ops
from ..errors import CapacityError, InvalidInputError, UnsupportedError
from ..formats.base import LayerCache, Plane
from ..formats.per_layer import KVCacheDtype
from ..spec import CACHE_LAYOUTS
from .specs import FullAttentionSpec, KVCacheGroup, KVCacheSpec, MLASpec, group_layers

# How torch says, where it has no exception for it, that memory or a number of bytes is too much to ask.
_TOO_MUCH = re.compile("can't allocate memory|out of memory|calculation overflowed")


class PagedKVCache:
    """Blocks for all layers of a model in one zeroed allocation of slabs [n, P, bytes per block].

    Layers of one kind have a slab each, or one slab where their formats differ; layers of several kinds are cut into
    groups that overlay the same slabs, so that a block id belongs to one group at a time (see `group_layers`). A block
    of one layer is contiguous: its keys, then its values, then its scales, those of a head one after the other in
    either layout of keys and values. Block 0 is a block like any other here.

    A format that encodes whole blocks has a second cache, `recent`, for blocks that are not encoded yet: of the layers
    that have this format, in the model's dtype, with `recent_blocks` blocks of the same size, which a `BlockPool` of
    their own hands out. `layer(i).recent` is its part of a layer. What moves blocks is called for each cache with its
    ids.
    """

    recent: PagedKVCache | None

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int = 16,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: str = "NHD",
        kv_cache_dtype: str | KVCacheDtype = "auto",
        recent_blocks: int | None = None,
    ) -> None:
        """A cache of `num_layers` equal layers, but for those that `kv_cache_dtype` keeps in `dtype`, as
        "int8:skip=0,-1" says. recent_blocks: given exactly where the format encodes whole blocks.

        Raises:
            InvalidInputError: a number below 1, an unknown layout or format, a block size that the format has not, or a
                layer to skip that there is not.
            CapacityError: the device has not enough memory.
        """
        spec = FullAttentionSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype or torch.get_default_dtype(),
            block_size=block_size,
        )
        names = KVCacheDtype.of(kv_cache_dtype).of_layers(num_layers)
        specs = [replace(spec, kv_cache_dtype=name) for name in names]
        self._allocate(specs, num_blocks, device, layout, recent_blocks)

    @classmethod
    def from_specs(
        cls,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        *,
        device: torch.device | str | None = None,
        layout: str = "NHD",
        recent_blocks: int | None = None,
    ) -> PagedKVCache:
        """A cache with one spec per layer; kinds overlay one pool of `num_blocks` blocks."""
        cache = cls.__new__(cls)
        cache._allocate(specs, num_blocks, device, layout, recent_blocks)
        return cache

    @classmethod
    def layout_of(cls, specs: Sequence[KVCacheSpec]) -> PagedKVCache:
        """A cache of one block, and of one of `recent` where there is one, without memory (device "meta"): it says what
        groups and places layers get, and how many bytes a block takes."""
        whole_blocks = any(spec.format.whole_blocks for spec in specs)
        return cls.from_specs(specs, 1, device="meta", recent_blocks=1 if whole_blocks else None)

    def _allocate(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        device: torch.device | str | None,
        layout: str,
        recent_blocks: int | None,
    ) -> None:
        if num_blocks < 1 or not specs:
            name, got = ("num_blocks", num_blocks) if num_blocks < 1 else ("num_layers", len(specs))
            raise InvalidInputError(name, "at least 1", got)
        if layout not in CACHE_LAYOUTS:
            raise InvalidInputError("layout", f"one of {', '.join(CACHE_LAYOUTS)}", repr(layout))
        self.groups: tuple[KVCacheGroup, ...] = group_layers(specs)
        recent = _recent_specs(specs, recent_blocks, len(self.groups))
        self.layout = layout
        self.num_blocks = num_blocks
        self.bytes_per_block = self.groups[0].bytes_per_block
        last_slab = max(slab for group in self.groups for slab, _ in group.places)
        shape = (last_slab + 1, num_blocks, self.bytes_per_block)
        try:
            self.slabs = torch.zeros(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not _TOO_MUCH.search(str(error)):
                raise
            need = shape[0] * shape[1] * shape[2]
            raise CapacityError(f"a cache of {need} bytes does not fit on {device}; lower num_blocks") from error
        self.recent = None
        if recent and recent_blocks is not None:
            self.recent = PagedKVCache.from_specs(recent, recent_blocks, device=device, layout=layout)
        self._view_layers()

    def over(self, memory: torch.Tensor) -> PagedKVCache:
        """A cache of the same layers over memory of the caller's, such as pinned memory of the host; without `recent`.

        Args:
            memory: uint8 [n, P', bytes per block] as `slabs` of this cache, of any number of blocks and device.

        Raises:
            InvalidInputError: memory of another shape or dtype, or with gaps.
        """
        slabs, size = len(self.slabs), self.bytes_per_block
        if memory.dtype != torch.uint8 or memory.dim() != 3 or (len(memory), memory.shape[2]) != (slabs, size):
            got = f"{memory.dtype} {list(memory.shape)}"
            raise InvalidInputError("memory", f"torch.uint8 [{slabs}, *, {size}] as the slabs of this cache", got)
        if not memory.is_contiguous():
            raise InvalidInputError("memory", "contiguous", f"strides {memory.stride()}")
        cache = PagedKVCache.__new__(PagedKVCache)
        cache.groups, cache.layout, cache.bytes_per_block = self.groups, self.layout, size
        cache.num_blocks, cache.slabs, cache.recent = memory.shape[1], memory, None
        cache._view_layers()
        return cache

    def _view_layers(self) -> None:
        self._layers = {
            layer: _views(self.slabs[slab], start, spec, self.layout)
            for group in self.groups
            for layer, spec, (slab, start) in zip(group.layers, group.specs, group.places, strict=True)
        }
        if self.recent is not None:
            kept = (
                layer
                for group in self.groups
                for layer, spec in zip(group.layers, group.specs, strict=True)
                if spec.format.whole_blocks
            )
            for index, layer in enumerate(sorted(kept)):
                self._layers[layer] = replace(self._layers[layer], recent=self.recent.layer(index))
        # Equal texts are equal bytes for equal tokens.
        self._stored = {
            layer: f"{_stored_as(spec)}, {self.layout}, at byte {start} of slab {slab}"
            for group in self.groups
            for layer, spec, (slab, start) in zip(group.layers, group.specs, group.places, strict=True)
        }
        self._group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}

    @property
    def num_layers(self) -> int:
        """Layers that have a place in the cache."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those of `recent` included."""
        return self.slabs.numel() + (0 if self.recent is None else self.recent.nbytes)

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.slabs.device

    def layer(self, index: int) -> LayerCache:
        """The views of model layer `index`."""
        if index not in self._layers:
            raise InvalidInputError("index", f"a layer in [0, {self.num_layers})", index)
        return self._layers[index]

    def group_of(self, layer: int) -> int:
        """The KV group (and so the block table) of model layer `layer`."""
        self.layer(layer)
        return self._group_of[layer]

    def zero_blocks(self, ids: Sequence[int] | torch.Tensor) -> None:
        """Zero blocks in all layers: what a `clean_cache` owner does with each block the pool hands out."""
        index = _int64(ids)
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= self.num_blocks):
            raise InvalidInputError("ids", f"blocks in [0, {self.num_blocks})", index.tolist())
        self.slabs.index_fill_(1, index.to(self.device), 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]] | torch.Tensor) -> None:
        """Copy blocks (source, target) in all layers; every source is read before any target is written."""
        ops.copy_blocks(list(self.slabs), _int64(pairs).reshape(-1, 2))

    def swap_blocks(
        self,
        target: PagedKVCache,
        pairs: Sequence[tuple[int, int]] | torch.Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Copy blocks (source, block of `target`) of all layers to another cache, as `ops.swap_blocks` does.

        Blocks are copied as they are stored, so both caches must store alike: slabs of two formats may have one shape.

        Raises:
            InvalidInputError: a target with other layers, formats, shapes or layout, or as of `ops.swap_blocks`.
        """
        if not isinstance(target, PagedKVCache):
            raise InvalidInputError("target", "a PagedKVCache", type(target).__name__, "ops.swap_blocks takes tensors")
        mine, theirs = self._stored, target._stored
        if mine != theirs:
            differing = next((i for i in mine if theirs.get(i) != mine[i]), len(mine))
            expected = f"a cache that stores layer {differing} as {mine.get(differing, 'none')}"
            remedy = "make both of the same specs, or write the tokens anew"
            raise InvalidInputError("target", expected, theirs.get(differing, "none"), remedy)
        # One call for all slabs: block p of slab j is row j * P + p of all rows.
        rows = torch.arange(len(self.slabs), device="cpu")[:, None, None]
        rows = rows * torch.tensor([self.num_blocks, target.num_blocks], device="cpu")
        every = (rows + _int64(pairs).reshape(-1, 2)).reshape(-1, 2)
        ops.swap_blocks(self.slabs.flatten(0, 1), target.slabs.flatten(0, 1), every, stream=stream)

    def seal_blocks(self, ids: Sequence[int] | torch.Tensor, group: int = 0) -> None:
        """Store full blocks of a KV group, which will not be written again, as their format keeps such blocks.

        Nothing changes where a token is stored for good when it comes, as in all formats that are here.
        """
        index = _int64(ids).to(self.device)
        for layer, spec in zip(self.groups[group].layers, self.groups[group].specs, strict=True):
            form, dims = spec.format, (spec.head_dim, spec.value_dim)
            for rows, dim, planes in zip((form.key, form.value), dims, self._layers[layer].sides, strict=True):
                if not rows.seals:
                    continue
                for plane, sealed in zip(planes, rows.seal([x[index] for x in planes], dim), strict=True):
                    plane[index] = sealed


def _recent_specs(specs: Sequence[KVCacheSpec], recent_blocks: int | None, num_groups: int) -> list[KVCacheSpec]:
    """Of the second cache, for the layers that have a place in it."""
    recent = [spec.recent for spec in specs if spec.format.whole_blocks]
    names = ", ".join(sorted({spec.kv_cache_dtype for spec in specs if bool(recent) == spec.format.whole_blocks}))
    if recent and recent_blocks is None:
        each = 2 + max(spec.format.recent_blocks(spec.block_size) for spec in specs)
        remedy = f"{each} for each sequence, and one for each block_size of a step's new tokens, are enough"
        raise InvalidInputError("recent_blocks", f"given for kv_cache_dtype={names!r}", "None", remedy)
    if not recent and recent_blocks is not None:
        expected = f"None for kv_cache_dtype={names!r}, which stores each token when it comes"
        raise InvalidInputError("recent_blocks", expected, recent_blocks)
    if recent and num_groups > 1:
        raise UnsupportedError(
            f"kv_cache_dtype={names!r} has one KV group, these layers are of {num_groups}; choose a format that stores "
            "each token when it comes, as int8 or turboquant4:window=0, or a cache for each kind of layer"
        )
    return recent


def _int64(values: Sequence[object] | torch.Tensor) -> torch.Tensor:
    """A tensor stays where it is; other numbers go to the host, whatever the default device is."""
    return values.long() if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")


def _stored_as(spec: KVCacheSpec) -> str:
    """The format of a layer, and all that its bytes depend on beside the tokens."""
    dtypes = ", ".join(str(plane.dtype).removeprefix("torch.") for plane in spec.planes.values())
    heads = f"{spec.num_kv_heads} KV heads of {spec.head_dim} and {spec.value_dim}"
    return f"{spec.format.name} ({dtypes}) in blocks of {spec.block_size} tokens with {heads}"


def _views(slab: torch.Tensor, start: int, spec: KVCacheSpec, layout: str) -> LayerCache:
    """The planes [P, S or 1, H, n] of a layer that begins at byte `start` of a slab's blocks [P, bytes per block]."""
    # Planes of one dtype are views of one view of that dtype: torch.compile takes no others that a graph writes to.
    typed = {dtype: slab.view(dtype) for dtype in {plane.dtype for plane in spec.planes.values()}}
    planes = zip(spec.planes.items(), spec.offsets[:-1], strict=True)
    views = {}
    for (name, plane), first in planes:
        # Scales of a head's slots are one after the other, so that kernels read those of a tile as vectors.
        order = "HND" if name.endswith("_scale") else layout
        views[name] = _view(typed[plane.dtype], start + first, plane, spec, order)
    if isinstance(spec, MLASpec):
        (value,) = spec.format.value.planes(spec.latent_dim, spec.dtype)
        views["value"] = views["key"][..., : value.width]
    scales = (views.get("key_scale"), views.get("value_scale"))
    return LayerCache(views["key"], views["value"], *scales, format=spec.format.name)


def _view(elements: torch.Tensor, first: int, plane: Plane, spec: KVCacheSpec, layout: str) -> torch.Tensor:
    """A plane that begins at byte `first` of each block."""
    size, heads = 1 if plane.per_block else spec.block_size, spec.num_kv_heads
    inner = (size, heads, plane.width) if layout == "NHD" else (heads, size, plane.width)
    view = elements.narrow(1, first // plane.dtype.itemsize, size * heads * plane.width).unflatten(1, inner)
    return view if layout == "NHD" else view.transpose(1, 2)
