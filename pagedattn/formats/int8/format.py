"""The int8 format: rows as integers in -127..127 times a float32 scale of each token and head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels


class Int8Rows(RowFormat):
    """Symmetric: scale = largest magnitude of the row / 127 (1 for a row of zeros), up to four significant bits; code =
    row / scale, to the nearest even integer. Seven bits of a code times four of a scale are the eleven of a float16, so
    that it holds decoded rows exactly, but for a power of two. Steps are 4 % larger for it, on average."""

    name = codes = "int8"

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.int8, dim), Plane(torch.float32, 1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        wide = rows.float()
        # By a tensor: torch multiplies CUDA tensors by the reciprocal of a number.
        largest = wide.abs().amax(-1, keepdim=True) / torch.full((), 127.0, device=rows.device)
        upwards = to_four_bits(largest)
        of_row = torch.where(upwards == 0, 1.0, upwards)
        return (wide / of_row).round().clamp(-127, 127).to(torch.int8), of_row

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        codes, of_row = planes
        return codes.to(dtype) * of_row.to(dtype)

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KERNELS

        return KERNELS


def to_four_bits(scales: torch.Tensor) -> torch.Tensor:
    """Positive float32 up to four significant bits. NaN remains: of the bits a GPU gives it, the sum would be 0."""
    upwards = ((scales.view(torch.int32) + 0xFFFFF) & 0x7FF00000).view(torch.float32)
    return torch.where(scales.isnan(), scales, upwards)


ROWS = Int8Rows()
INT8 = CacheFormat("int8", ROWS, ROWS)
