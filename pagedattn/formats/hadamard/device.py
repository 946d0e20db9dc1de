"""The rotation as device code; `rotation.py` says what it is."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rounding import nearest_even, powers_of_two
from . import rotation, steps

block_of = triton.constexpr_function(rotation.block_of)
FRACTION = tl.constexpr(steps.FRACTION)
_steps_per_unit = triton.constexpr_function(steps.steps_per_unit)
step_size = triton.constexpr_function(steps.step_size)


@triton.constexpr_function
def rounds_of(dim):
    return (dim & -dim).bit_length() - 1


@triton.jit
def signs(dim):
    """1.0 or -1.0 of elements at places `dim`."""
    x = (dim + 1).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return 1.0 - 2.0 * ((x >> 16) & 1).to(tl.float32)


@triton.jit
def hadamard(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """H times each row of a tile [M, BLOCK_D], not divided by sqrt(block); zero beyond D, as it came."""
    M: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = block_of(D)
    if SIZE > 1:
        for _ in tl.static_range(rounds_of(D)):
            a, b = tl.split(tl.reshape(x, (M, BLOCK_D // SIZE, SIZE // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, BLOCK_D))
    return x


@triton.jit
def rotated_steps(row, mask, D: tl.constexpr, WIDTH: tl.constexpr):
    """Of float32 rows [M, WIDTH]: steps, whole numbers as float32, 0 outside `mask`, the powers of two [M], and which
    rows are finite. `steps.rotated_steps` says what they are."""
    # The largest of bits, in which NaN is larger than all numbers.
    largest = tl.max(row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    up, down = powers_of_two(largest)
    turned = hadamard(row * down[:, None] * signs(tl.arange(0, WIDTH))[None, :], D, WIDTH)
    turned = tl.where(mask & finite[:, None], turned, 0.0)
    return nearest_even(turned * _steps_per_unit(D, FRACTION)), up, finite


@triton.jit
def rotate(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D], rotated."""
    ROOT: tl.constexpr = block_of(D) ** -0.5
    turned = hadamard(x.to(tl.float32) * (signs(tl.arange(0, BLOCK_D)) * ROOT)[None, :], D, BLOCK_D)
    return turned.to(x.dtype)


@triton.jit
def rotate_back(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D] as it was before the rotation."""
    ROOT: tl.constexpr = block_of(D) ** -0.5
    back = hadamard(x.to(tl.float32), D, BLOCK_D) * (signs(tl.arange(0, BLOCK_D)) * ROOT)[None, :]
    return back.to(x.dtype)
