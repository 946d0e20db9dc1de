"""The device half of the fp8 formats. Tiles are loaded as they are: kernels convert them to the query's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..base import RowKernels
from ..native.device import load_tile


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 to the bits of an fp8, nearest even and saturated. By integers: Triton casts to e4m3 on new GPUs only."""
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B  # 448, 57344
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Rounding may carry into the exponent, which is what it should do.
    half_less_one = (1 << (DROPPED - 1)) - 1
    rounded = (magnitude + half_less_one + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal, an addition aligns the last bit kept with the last bit of the sum.
    ALIGN: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    aligner = tl.full(x.shape, ALIGN, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + aligner).to(tl.int32, bitcast=True) - ALIGN
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_row(
    rows, codes, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = triton.next_power_of_2(H * D)
    index = tl.arange(0, N)  # [N] over heads and dims
    head, dim = (index // D).to(tl.int64), index % D
    mask = index < H * D
    value = tl.load(rows + token * s_rt + head * s_rh + dim, mask=mask)
    divisor = scale_value
    if SCALES:
        divisor = tl.load(scale + head * (SCALES > 1), mask=mask, other=1.0)
    value = fp8_bits(tl.div_rn(value.to(tl.float32), divisor), MANTISSA, BIAS)
    tl.store(codes + block * s_cb + slot * s_cs + head * s_ch + dim, value, mask=mask)


@triton.jit
def write_e4m3(
    rows, codes, scales, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    _write_row(rows, codes, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot, H, D, SCALES, 3, 7)


@triton.jit
def write_e5m2(
    rows, codes, scales, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    _write_row(rows, codes, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot, H, D, SCALES, 2, 15)


KERNELS = {
    torch.float8_e4m3fn: RowKernels(write_e4m3, load_tile),
    torch.float8_e5m2: RowKernels(write_e5m2, load_tile),
}
