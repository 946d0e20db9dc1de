"""How the cache of a case stores keys and values: by its format's torch half, with the scales that a call gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..formats.base import LayerCache, Plane, RowFormat
from ..formats.registry import format_of
from ..spec import Scale
from .case import Case

_GARBAGE = 0x55  # in unused slots of integers, which have no NaN


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Those of K, or of V: their format, and the scale that comes with the call.

    whole_blocks: full blocks only are encoded, and rows of others lie in a second cache."""

    rows: RowFormat
    scale: Scale = None
    whole_blocks: bool = False

    def blocks(self, rows: torch.Tensor, size: int, sealed: int) -> list[torch.Tensor]:
        """Planes [n, S or 1, Hkv, width] of one sequence's rows [L, Hkv, D], its first `sealed` blocks sealed; of full
        blocks only, where the format encodes no others."""
        if self.whole_blocks:
            full = len(rows) // size
            return list(self.rows.encode(rows[: full * size].reshape(full, size, *rows.shape[1:])))
        scale = torch.tensor([self.scale], device=rows.device) if isinstance(self.scale, int | float) else self.scale
        dim, count, planes = rows.shape[2], -(-len(rows) // size), []
        for plane, codes in zip(self.rows.planes(dim, rows.dtype), self.rows.encode(rows, scale), strict=True):
            whole = bits(codes.new_empty(count * size, *codes.shape[1:])).zero_()
            whole[: len(rows)] = bits(codes)
            whole = whole.view(codes.dtype).unflatten(0, (count, size))
            planes.append(whole[:, :1] if plane.per_block else whole)
        if not (self.rows.seals and sealed):
            return planes
        done = self.rows.seal([plane[:sealed] for plane in planes], dim)
        return [torch.cat((new, plane[sealed:])) for new, plane in zip(done, planes, strict=True)]

    def read(self, rows: torch.Tensor, size: int, sealed: int) -> torch.Tensor:
        """What attention sees of rows that went through the cache: float64, or the rows where they are kept."""
        if self.rows.planes(rows.shape[2], rows.dtype)[0] == Plane(rows.dtype, rows.shape[2]):
            return rows
        decoded = self.rows.decode(self.blocks(rows, size, sealed), rows.shape[2], torch.float64)
        scale = (
            self.scale[:, None] if isinstance(self.scale, torch.Tensor) else 1.0 if self.scale is None else self.scale
        )
        decoded = decoded.flatten(0, 1)[: len(rows)] * scale
        return torch.cat((decoded, rows[len(decoded) :].double()))

    def to(self, device: torch.device | str) -> StoredRows:
        """The same with a scale tensor on `device`."""
        scale = self.scale.to(device) if isinstance(self.scale, torch.Tensor) else self.scale
        return replace(self, scale=scale)


def stored_as(case: Case) -> tuple[StoredRows, StoredRows]:
    """Of a case: keys and values have scales of their own, no power of two; of latent rows both are one."""
    scales: tuple[Scale, Scale] = (None, None)
    if case.kv_scale == "float":
        scales = 0.03, 0.011
    elif case.kv_scale == "tensor":
        scales = torch.tensor([0.03]), torch.tensor([0.011])
    elif case.kv_scale == "head":
        heads = torch.arange(case.heads[1], dtype=torch.float32)
        scales = 0.03 + 0.01 * heads, 0.011 + 0.003 * heads
    if case.latent_dim is not None:
        scales = scales[0], scales[0]
    form = format_of(case.kv_cache_dtype)
    key, value = (StoredRows(*side, form.whole_blocks) for side in zip((form.key, form.value), scales, strict=True))
    return key, value


def unused_planes(planes: Sequence[Plane], num_blocks: int, case: Case) -> list[torch.Tensor]:
    """Planes [P, S or 1, Hkv, width] in which nothing was written yet."""
    out = []
    for plane in planes:
        shape = (num_blocks, 1 if plane.per_block else case.block_size, case.heads[1], plane.width)
        out.append(torch.full(shape, unused_element(plane.dtype, case)).to(plane.dtype))
    return out


def unused_element(dtype: torch.dtype, case: Case) -> float:
    """What lies in a plane where nothing was written."""
    return case.unused if dtype.is_floating_point else _GARBAGE * bool(case.unused)


def layer_cache(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kv_cache_dtype: str) -> LayerCache:
    """The cache of planes of K and of V."""
    (key, *key_scale), (value, *value_scale) = keys, values
    return LayerCache(key, value, *key_scale or [None], *value_scale or [None], format=format_of(kv_cache_dtype).name)


def latent_cache(cache: LayerCache) -> LayerCache:
    """The same rows as a latent cache has them: values are a view of the keys."""
    return LayerCache(cache.key, cache.key[..., : cache.value.shape[3]], format=cache.format)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers where elements are of 8 bits: not every torch indexes fp8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
