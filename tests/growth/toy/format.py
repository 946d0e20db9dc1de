"""The toy format. K: 4-bit codes, two a byte; V: 8-bit codes with a scale of each token; both rotated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from pagedattn.formats.base import CacheFormat, Plane, RowFormat, RowKernels
from pagedattn.formats.int8.format import Int8Rows

OPEN = 0.5  # what codes of an open block are multiplied with, in every channel
ROOT_HALF = 0.70710678


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Neighbours (a, b) as (a + b, a - b) / sqrt(2): its own inverse."""
    a, b = rows[..., ::2], rows[..., 1::2]
    return torch.stack(((a + b) * ROOT_HALF, (a - b) * ROOT_HALF), -1).flatten(-2)


class ToyKeys(RowFormat):
    """Rotated, then 15 steps of a channel's scale, which a block gets when it is sealed."""

    name = "rotated_int4_of_blocks"
    seals = True

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.uint8, dim // 2), Plane(torch.float32, dim, per_block=True)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return self._pack(rotate(rows.float()) / OPEN), torch.full_like(rows, OPEN, dtype=torch.float32)

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        return rotate(self._unpack(planes, dtype))

    def seal(self, planes: Sequence[torch.Tensor], dim: int) -> tuple[torch.Tensor, ...]:
        values = self._unpack(planes, torch.float32)
        scale = values.abs().amax(1, keepdim=True) / 7
        scale = torch.where(scale == 0, OPEN, scale)
        return self._pack(values / scale), scale

    def _pack(self, steps: torch.Tensor) -> torch.Tensor:
        codes = (steps.round().clamp(-7, 7) + 8).to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4

    def _unpack(self, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = planes
        return (torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(dtype) - 8) * scale.to(dtype)

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KEYS

        return KEYS


class ToyValues(Int8Rows):
    """Rotated, then as int8."""

    name = "rotated_int8"

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return super().encode(rotate(rows.float()))

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        return rotate(super().decode(planes, dim, dtype))

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import VALUES

        return VALUES


TOY = CacheFormat("toy", ToyKeys(), ToyValues())
