"""The k8v4 format: keys as int8, values rotated and as one of 16 levels times a float32 scale of each token and head.

Values bear few bits: their errors average out over the keys, while those of keys are in the exponent. Rotated, a row's
elements are nearly normal, and the levels are those of the quantiser with the least squared error for that (Lloyd-Max).
Source: Max, "Quantizing for minimum distortion", 1960; TurboQuant (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels
from ..hadamard.rotation import hadamard, rotate_back, signs
from ..int8.format import ROWS as INT8_ROWS

LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)  # of positive codes, 46.48 of them the standard deviation
EDGES = (24, 49, 75, 102, 133, 171, 223)  # twice the middle of neighbours
SPREAD = 2160  # the square of the standard deviation, in levels
FRACTION = 12  # binary digits behind the point of a rotated element


class RotatedRows4(RowFormat):
    """Two codes a byte, the element of the lower place in the lower half; a code is a sign (8) and a level's number.

    The scale is the one of least squared error for its codes. All sums are of integers, so that their order does not
    matter, and kernels write the same bits. A row with an element that is not finite becomes NaN.
    """

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.uint8, -(-dim // 2)), Plane(torch.float32, 1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        dim = rows.shape[-1]
        up, steps = _steps(rows.float())
        size, total = steps.abs(), (steps * steps).sum(-1, keepdim=True)
        square, number = size * size * (4 * SPREAD * dim), torch.zeros_like(size)
        for edge in EDGES:
            number += square > edge * edge * total
        level = torch.tensor(LEVELS, device=rows.device)[number]
        found = (size * level).sum(-1, keepdim=True).float() / (level * level).sum(-1, keepdim=True).float()
        of_row = found * step_size(dim, FRACTION) * up
        codes = torch.nn.functional.pad((number + 8 * (steps < 0)).to(torch.uint8), (0, dim % 2))
        return codes[..., ::2] | codes[..., 1::2] << 4, of_row

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        packed, of_row = planes
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :dim].long()
        level = torch.tensor([*LEVELS, *(-x for x in LEVELS)], dtype=dtype, device=packed.device)[codes]
        return rotate_back(level * of_row.to(dtype))

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
