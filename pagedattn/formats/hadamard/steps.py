"""Rotated rows as whole numbers of steps, of which every sum is exact: kernels find the same bits in any order."""

from __future__ import annotations

import torch

from .rotation import hadamard, signs

FRACTION = 12  # binary digits behind the point of a rotated element, where the row's largest one was below 2


def rotated_steps(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D], rotated, as whole numbers int64 below 2**18, and the power of two float32 [..., 1] that they were
    divided by before. Of a row with an element that is not finite: zeros, and NaN."""
    dim, rows = rows.shape[-1], rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    exponent = ((largest.view(torch.int32) >> 23) & 255).clamp(1, 253)
    up = (exponent << 23).view(torch.float32)
    down = ((254 - exponent) << 23).view(torch.float32)
    turned = hadamard(rows * down * signs(dim, rows.device))
    turned = torch.where(largest < torch.inf, turned, 0.0)  # an integer could not say so
    steps = (turned * steps_per_unit(dim, FRACTION)).round().to(torch.int64)
    return steps, torch.where(largest < torch.inf, up, torch.nan)


# These two are device code as well, so that they may name nothing but their arguments.
def steps_per_unit(dim: int, fraction: int) -> float:
    """A power of two: so many steps has an element of a product with H, which is larger by about sqrt(block)."""
    return 2.0 ** (fraction - (dim & -dim).bit_length() // 2)


def step_size(dim: int, fraction: int) -> float:
    """What a step stands for, but for the power of two: a power of two, or one times sqrt(2)."""
    return 2.0 ** ((dim & -dim).bit_length() // 2 - fraction) * (dim & -dim) ** -0.5
