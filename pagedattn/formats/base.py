"""CacheFormat: how keys and values lie in a block, as planes. LayerCache: the planes of one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import InvalidInputError

_LAYOUTS: dict[tuple[object, ...], object] = {}


class Plane(NamedTuple):
    """What a cache keeps for K or for V: `width` elements per KV head, of each token, or of each block."""

    dtype: torch.dtype
    width: int
    per_block: bool = False

    def fits(self, tensor: torch.Tensor, codes: torch.Tensor) -> bool:
        """Whether a tensor is this plane of a cache with these codes [P, S, Hkv, n], so that what names a slot of the
        codes names one of it."""
        if codes.dim() != 4:  # packed rows, which no cache holds
            return False
        shape = (codes.shape[0], 1 if self.per_block else codes.shape[1], codes.shape[2], self.width)
        return tensor.dtype == self.dtype and tensor.shape == shape and (self.width == 1 or tensor.stride(3) == 1)


def check_scales(name: str, planes: Sequence[Plane], scales: torch.Tensor | None, codes: torch.Tensor) -> None:
    """Raise InvalidInputError unless a second plane is given exactly where `planes` has one, and fits the codes."""
    if (scales is None) == (len(planes) == 1) and (scales is None or planes[1].fits(scales, codes)):
        return
    expected = "None, as the format has no scales"
    if len(planes) > 1:
        tokens = "1" if planes[1].per_block else "S"
        expected = f"{planes[1].dtype} [P, {tokens}, Hkv, {planes[1].width}] beside codes {list(codes.shape)}"
    got = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
    raise InvalidInputError(name, expected, got, "pass all planes of one LayerCache, as PagedKVCache.layer(i) has them")


def check_takes_scales(form: CacheFormat, k_scale: object, v_scale: object) -> None:
    """Raise InvalidInputError where a call brings scales for a format that computes them itself. Elements of the
    model's dtype may be multiplied when they are read."""
    if (k_scale is not None or v_scale is not None) and not form.takes_scales and form.name != "auto":
        raise takes_no_scales("k_scale, v_scale", form.name)


def takes_no_scales(names: str, kv_cache_dtype: str) -> InvalidInputError:
    """Of scales that come for a format without any of the caller's."""
    remedy = "leave them out, or take kv_cache_dtype='fp8'"
    return InvalidInputError(names, "given for fp8 caches only", f"one for kv_cache_dtype={kv_cache_dtype!r}", remedy)


def plane_strides(plane: torch.Tensor | None) -> tuple[int, int, int] | None:
    """By block, slot and head, of a plane [P, S or 1, Hkv, n]; one of blocks has the same for all slots."""
    if plane is None:
        return None
    return plane.stride(0), plane.stride(1) if plane.shape[1] > 1 else 0, plane.stride(2)


class RowKernels(str):
    """The device half of a RowFormat, a constant of the kernels that call it: jitted functions.

    What they are given and return is said once, at those of the native format (`native/device.py`). A string of their
    names, since Triton hands constants to hooks on compilation (vLLM's, profilers') as JSON.

    write_rows: store rows in their slots. None of formats whose blocks are written whole.
    write_block(rows, codes, scales, s_rows, s_codes, s_scales, part, S, D, PARTS): store S rows of D elements of one KV
        head, each pointer standing at the head's first slot of a block, slots s_* elements apart; of PARTS calls, which
        run at the same time, the part-th. None of other formats.
    load_tile: a tile of rows, of any dtype that converts to the query's.
    row_scale: what each row of a tile is yet to be multiplied with; kernels apply it to columns of logits and of
        probabilities. None: nothing.
    rotate: of K, what queries go through; of V, what the output goes through. None: rows are stored as they are.
    """

    __slots__ = ("load_tile", "rotate", "row_scale", "write_block", "write_rows")
    write_rows: Any
    load_tile: Any
    row_scale: Any
    rotate: Any
    write_block: Any

    def __new__(
        cls, write_rows: Any, load_tile: Any, row_scale: Any = None, rotate: Any = None, write_block: Any = None
    ) -> RowKernels:
        functions = (write_rows, load_tile, row_scale, rotate, write_block)
        text = ", ".join("None" if one is None else f"{one.fn.__module__}.{one.fn.__qualname__}" for one in functions)
        self = super().__new__(cls, text)
        self.write_rows, self.load_tile, self.row_scale, self.rotate, self.write_block = functions
        return self

    @property
    def cache_key(self) -> str:
        """For Triton's cache of compiled kernels, which else would know the functions by their names alone."""
        functions = (self.write_rows, self.load_tile, self.row_scale, self.rotate, self.write_block)
        return "-".join("" if one is None else one.cache_key for one in functions)


class RowFormat(ABC):
    """How rows are stored, those of K or those of V: the torch half, which is the reference.

    A row is one token's head_dim elements of one KV head. The first plane holds its codes, [P, S, Hkv, width]; a second
    one, where there is one, scales, [P, S, Hkv, width], or of a block, [P, 1, Hkv, width].
    """

    name: str  # what `KVCacheDtype(key=..., value=...)` calls it
    # As what kernels that convert codes by themselves know the first plane: "e4m3", "e5m2", "int8" or "rotated_int4"
    # (`k8v4`), beside which the second plane is a float32 factor of each row, of int8 one of four significant bits,
    # "turboquantN" with one in float16, or "int4_per_channel" with steps and least elements. None: only the device half
    # reads it.
    codes: str | None = None
    # The most keys of a tile that the device half loads, beginning at a multiple of them, so that a tile lies in one
    # block. None: tiles of any size.
    tile_keys: int | None = None
    takes_scale = False  # whether a scale comes with each call: what is stored is row / scale
    seals = False  # whether a full block is stored otherwise than its rows were when they came
    # Whether full blocks only are encoded, [..., S, Hkv, D], so that the rows of open ones lie in a second cache.
    whole_blocks = False

    @abstractmethod
    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        """One or two planes, for rows of `dim` elements in a model of `dtype`."""

    @abstractmethod
    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Rows [..., Hkv, D] as each plane holds them, [..., Hkv, width]. For a plane of blocks: what an open block
        holds, which is the same for each of its rows. scale: float32 [1] or [Hkv], None for 1.

        Where `whole_blocks`, blocks [..., S, Hkv, D] as planes [..., S or 1, Hkv, width]."""

    @abstractmethod
    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Planes [..., S, Hkv, width] as the rows [..., S, Hkv, dim] that they stand for, but for a call's scale."""

    def seal(self, planes: Sequence[torch.Tensor], dim: int) -> tuple[torch.Tensor, ...]:
        """The planes of full blocks [n, S or 1, Hkv, width] as they are to be stored from now on."""
        return tuple(planes)

    @cached_property
    @abstractmethod
    def kernels(self) -> RowKernels:
        """The device half; imports triton."""


_MOST_TOKENS = 1 << 30  # of a window, which kernels count in 32 bits


@dataclass(frozen=True, eq=False)
class CacheFormat:
    """How a cache stores K and V. has_csrc: whether the C++ extension writes it too. block_multiple: of how many tokens
    block sizes are multiples. best_block_size: from how many tokens on blocks are read fastest. window: of how many
    tokens before its own block a query reads what was not encoded. first: of how many tokens at the sequence's
    beginning. usual_window: the window of a model for which none is said. latent_only: latent rows are stored so
    (`mla_rows`), and no keys and values."""

    name: str
    key: RowFormat
    value: RowFormat
    has_csrc: bool = False
    block_multiple: int = 1
    best_block_size: int = 16
    window: int = 0
    first: int = 0
    usual_window: int = 0
    latent_only: bool = False

    def with_native(self, window: int, first: int) -> CacheFormat:
        """The same with a window of so many tokens and so many first ones in the model's dtype, named
        NAME:window=N:first=N without what is 0.

        Raises:
            InvalidInputError: a number below 0, or one for a format that stores what the model computes, that takes
                scales with each call, that stores a full block otherwise than its rows, or that has such numbers.
        """
        takes_none = self.name == "auto" or any(one.takes_scale or one.seals for one in (self.key, self.value))
        takes_none = takes_none or self.window > 0 or self.first > 0
        text = ""
        for name, count in (("window", window), ("first", first)):
            if not 0 <= count < _MOST_TOKENS:
                raise InvalidInputError(name, f"tokens in 0..{_MOST_TOKENS - 1}", count)
            if count and takes_none:
                remedy = f"pass {name}=0, or a format such as turboquant4 or int4"
                raise InvalidInputError(name, f"0 for kv_cache_dtype={self.name!r}", count, remedy)
            text += f":{name}={count}" if count else ""
        return replace(self, name=f"{self.name}{text}", window=window, first=first) if text else self

    @property
    def encoded_as(self) -> str:
        """The name of the format without tokens in the model's dtype."""
        return self.name.partition(":")[0]

    def recent_blocks(self, block_size: int) -> int:
        """Blocks before its own of which a query reads what was not encoded: whole ones, so that neither chunks nor the
        place of a block in a step change a result."""
        return -(-self.window // block_size)

    def first_blocks(self, block_size: int) -> int:
        """Blocks at the sequence's beginning that are never read as they are encoded."""
        return -(-self.first // block_size)

    def native_keys(self, position: int, block_size: int) -> int:
        """Of the keys that a query at this position attends to, itself included, those that it reads in the model's
        dtype under full causal attention. Where a format has no second cache, that is none, or of "auto" every one."""
        if not self.whole_blocks:
            return position + 1 if self.name == "auto" else 0
        first_recent = max(position // block_size - self.recent_blocks(block_size), 0)
        kept = min(self.first_blocks(block_size), first_recent)
        return position + 1 - (first_recent - kept) * block_size

    def check_block_size(self, size: int) -> None:
        """Raise InvalidInputError for blocks that the format has not."""
        if size % self.block_multiple:
            expected = f"a multiple of {self.block_multiple} for kv_cache_dtype={self.name!r}"
            remedy = f"pass block_size={-(-size // self.block_multiple) * self.block_multiple}"
            raise InvalidInputError("block_size", expected, size, remedy)

    @property
    def default_block_size(self) -> int:
        """Tokens per block where nobody says: the fewest that are read fastest."""
        return -(-self.best_block_size // self.block_multiple) * self.block_multiple

    @property
    def takes_scales(self) -> bool:
        """Whether scales of K and V come with each call."""
        return self.key.takes_scale or self.value.takes_scale

    @property
    def whole_blocks(self) -> bool:
        """Whether full blocks only are encoded: a layer has a second cache for others (`LayerCache.recent`)."""
        return self.key.whole_blocks or self.window > 0 or self.first > 0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer gets: planes [P, S, Hkv, n] whose strides say how they lie in memory.

    key, value: the codes; of 16-bit and fp8 caches the elements themselves, [P, S, Hkv, D] and [P, S, Hkv, Dv], for MLA
        value a view of key. key_scale, value_scale: second planes, [P, S or 1, Hkv, n].
    format: the name of their CacheFormat; None: known by their dtype.
    recent: of formats that encode whole blocks, the layer's second cache, of the model's dtype, which holds the rows of
        blocks that are not encoded yet, in blocks of the same size and a pool of its own.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    format: str | None = None
    recent: LayerCache | None = None
    _layout: object = field(default=None, init=False, repr=False, compare=False)

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All that there are, but for those of `recent`."""
        every = (self.key, self.value, self.key_scale, self.value_scale)
        return tuple(plane for plane in every if plane is not None)

    @property
    def sides(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Planes of K, and planes of V."""
        keys, values = (self.key, self.key_scale), (self.value, self.value_scale)
        return [x for x in keys if x is not None], [x for x in values if x is not None]

    @property
    def stored(self) -> dict[str, Any]:
        """The format and its second planes, as ops take them beside `key` and `value`."""
        scales = {"k_scale_cache": self.key_scale, "v_scale_cache": self.value_scale}
        return {"kv_cache_dtype": self.format or "auto", **scales}

    @property
    def row_kernels(self) -> tuple[RowKernels, RowKernels]:
        """The device halves of the formats of K and of V, for kernels that encode; imports triton. Rows in the codes'
        own dtype are stored as they are instead."""
        from .registry import stored_as

        form = stored_as(self.format, self.key.dtype)
        return form.key.kernels, form.value.kernels

    @property
    def scale_strides(self) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
        """By block, slot and head, of `key_scale` and of `value_scale`; None where there is none."""
        return plane_strides(self.key_scale), plane_strides(self.value_scale)

    @property
    def layout(self) -> object:
        """One object for all caches whose shapes, strides, dtypes, devices and formats are the same; None of tensor
        subclasses.

        What was found right for a cache is right for every cache of its layout.
        """
        if self._layout is None and all(type(plane) is torch.Tensor for plane in self.planes):
            every = (self.key, self.value, self.key_scale, self.value_scale)
            about = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in every]
            shared = self.key.data_ptr() == self.value.data_ptr()
            recent = None if self.recent is None else self.recent.layout
            object.__setattr__(self, "_layout", _LAYOUTS.setdefault((*about, shared, self.format, recent), object()))
        return self._layout

    @property
    def num_blocks(self) -> int:
        """P."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """S."""
        return self.key.shape[1]
