"""Device code: quotients and whole numbers as IEEE rounds them, by additions and products. A division is ten times as
many instructions and a branch, and GPUs convert a quarter as many numbers in a cycle as they add."""

from __future__ import annotations

import triton
import triton.language as tl

_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2**23: of a sum with it float32 keeps no digits behind the point
_SHIFT_BITS = tl.constexpr(0x4B400000)
_BEYOND = tl.constexpr(2.0**18)


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
    """x / y, of float32 tensors; per_y: 1 / y to about 2**-22, or 0 for quotients of 0.

    y has at most 11 significant bits, so that a quotient is further than 2**-36 of itself from where rounding changes
    and what the first product lacks is exact; no intermediate result may overflow or be subnormal."""
    near = x * per_y
    return tl.fma(tl.fma(-near, y, x), per_y, near)


@triton.jit
def powers_of_two(magnitude):
    """Of float32 magnitudes, given as their bits int32, the power of two that each begins with and one by it; both are
    normal numbers, so that of subnormal and of the largest magnitudes it is the nearest such."""
    exponent = tl.minimum(tl.maximum(magnitude >> 23, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def saturating_quotient(x, y):
    """x / y, of float32, y broadcast; a quotient beyond 2**16 is as large or larger. NaN stays NaN.

    After the first correction a quotient is less than a last place off, so that the second one rounds as IEEE does if
    1 / y is rounded so (Markstein). Powers of two keep y near 1 and quotients finite."""
    _, down = powers_of_two(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    y = y * down
    per_y = tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y)
    x = tl.minimum(tl.maximum(x * down, -_BEYOND, tl.PropagateNan.ALL), _BEYOND, tl.PropagateNan.ALL)
    quotient = x * per_y
    for _ in tl.static_range(2):
        quotient = tl.fma(tl.fma(quotient, y, -x), -per_y, quotient)  # in this order -0.0 stays -0.0
    return quotient
