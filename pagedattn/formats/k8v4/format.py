"""The k8v4 format: keys as int8, values rotated and as one of 16 levels times a float32 scale of each token and head.

Values bear few bits: their errors average out over the keys, while those of keys are in the exponent. Rotated, a row's
elements are nearly normal. Levels are evenly spaced, so that kernels turn a code into a number by one multiplication;
in steps of each row's own largest element they cost a squared error of 1.03 % at 128 elements, where the best levels
for a normal distribution (Lloyd-Max) have 0.92 %. Source: QuaRot (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels
from ..bit_packing.packing import bytes_of, pack, unpack
from ..hadamard.rotation import rotate_back
from ..hadamard.steps import FRACTION, rotated_steps, step_size
from ..int8.format import ROWS as INT8_ROWS

HALF_STEPS = 17  # that a row's largest element is long; levels are odd numbers of them up to 15


class RotatedRows4(RowFormat):
    """Codes c in 0..15, packed; c stands for 2c - 15.

    The scale is the one of least squared error for its codes. All sums are of integers, so that their order does not
    matter, and kernels write the same bits. A row with an element that is not finite becomes NaN.
    """

    name = codes = "rotated_int4"

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.uint8, bytes_of(dim, 4)), Plane(torch.float32, 1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        dim = rows.shape[-1]
        steps, up = rotated_steps(rows)
        size, number = steps.abs(), torch.zeros_like(steps)
        for edge in range(2, 16, 2):
            number += size * HALF_STEPS >= size.amax(-1, keepdim=True) * edge
        level = 2 * number + 1
        found = (size * level).sum(-1, keepdim=True).float() / (level * level).sum(-1, keepdim=True).float()
        of_row = found * step_size(dim, FRACTION) * up
        return pack(torch.where(steps < 0, 7 - number, 8 + number), 4), of_row

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        packed, of_row = planes
        return rotate_back((2 * unpack(packed, 4, dim).long() - 15).to(dtype) * of_row.to(dtype))

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KERNELS

        return KERNELS


K8V4 = CacheFormat("k8v4", INT8_ROWS, RotatedRows4())
