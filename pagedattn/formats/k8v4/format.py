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
from ..hadamard.rotation import hadamard, rotate_back, signs
from ..int8.format import ROWS as INT8_ROWS

HALF_STEPS = 17  # that a row's largest element is long; levels are odd numbers of them up to 15
FRACTION = 12  # binary digits behind the point of a rotated element


class RotatedRows4(RowFormat):
    """Two codes c in 0..15 a byte, the element of the lower place in the lower half; c stands for 2c - 15.

    The scale is the one of least squared error for its codes. All sums are of integers, so that their order does not
    matter, and kernels write the same bits. A row with an element that is not finite becomes NaN.
    """

    codes = "rotated_int4"

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.uint8, -(-dim // 2)), Plane(torch.float32, 1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        dim = rows.shape[-1]
        up, steps = _steps(rows.float())
        size, number = steps.abs(), torch.zeros_like(steps)
        for edge in range(2, 16, 2):
            number += size * HALF_STEPS >= size.amax(-1, keepdim=True) * edge
        level = 2 * number + 1
        found = (size * level).sum(-1, keepdim=True).float() / (level * level).sum(-1, keepdim=True).float()
        of_row = found * step_size(dim, FRACTION) * up
        codes = torch.nn.functional.pad(torch.where(steps < 0, 7 - number, 8 + number).to(torch.uint8), (0, dim % 2))
        return codes[..., ::2] | codes[..., 1::2] << 4, of_row

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        packed, of_row = planes
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :dim].long()
        return rotate_back((2 * codes - 15).to(dtype) * of_row.to(dtype))

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KERNELS

        return KERNELS


def _steps(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated float32 rows as whole numbers int64, and the power of two that the largest element was divided by."""
    dim = rows.shape[-1]
    largest = rows.abs().amax(-1, keepdim=True)
    exponent = ((largest.view(torch.int32) >> 23) & 255).clamp(1, 253)
    up = (exponent << 23).view(torch.float32)
    down = ((254 - exponent) << 23).view(torch.float32)
    turned = hadamard(rows * down * signs(dim, rows.device))
    turned = torch.where(largest < torch.inf, turned, 0.0)  # an integer could not say so
    steps = (turned * steps_per_unit(dim, FRACTION)).round().to(torch.int64)
    return torch.where(largest < torch.inf, up, torch.nan), steps


# These two are device code as well, so that they may name nothing but their arguments.
def steps_per_unit(dim: int, fraction: int) -> float:
    """A power of two: so many steps has an element of a product with H, which is larger by about sqrt(block)."""
    return 2.0 ** (fraction - (dim & -dim).bit_length() // 2)


def step_size(dim: int, fraction: int) -> float:
    """What a step stands for, but for `up`: a power of two, or one times sqrt(2)."""
    return 2.0 ** ((dim & -dim).bit_length() // 2 - fraction) * (dim & -dim) ** -0.5


K8V4 = CacheFormat("k8v4", INT8_ROWS, RotatedRows4())
