"""Device code: quotients and whole numbers as IEEE rounds them, by additions and products. A division is ten times as
many instructions and a branch, and GPUs convert a quarter as many numbers in a cycle as they add."""

from __future__ import annotations

import triton
import triton.language as tl

_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2**23: of a sum with it float32 keeps no digits behind the point
_SHIFT_BITS = tl.constexpr(0x4B400000)


@triton.jit
def nearest_even(x):
    """Of a magnitude below 2**22. Of larger ones something as large."""
    return (x + _SHIFT) - _SHIFT


@triton.jit
def nearest_integer(x):
    """The same as int32, of magnitudes below 2**22."""
    return (x + _SHIFT).to(tl.int32, bitcast=True) - _SHIFT_BITS


@triton.jit
def divide(x, y, per_y):
    """x / y, of float32 tensors of one shape; per_y: 1 / y to about 2**-22, or 0 for quotients of 0.

    y has at most 11 significant bits, so that a quotient is further than 2**-36 of itself from where rounding changes
    and what the first product lacks is exact; no intermediate result may overflow or be subnormal."""
    near = x * per_y
    return tl.fma(tl.fma(-near, y, x), per_y, near)
