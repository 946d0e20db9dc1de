"""The device half of the fp8 formats. Tiles are loaded as they are: kernels convert them to the query's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

from ..base import RowKernels
from ..native.device import load_tile
from ..rounding import saturating_quotient


@triton.constexpr_function
def _converts_by_hardware(elements):
    return elements % 4 == 0 and cuda_capability_geq(8, 9) and not knobs.runtime.interpret


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 to the bits of an fp8, nearest even and saturated. GPUs before sm_89 have no instruction for it, Triton's
    interpreter casts wrongly."""
    if _converts_by_hardware(x.numel):
        return _converted(x, "e4m3x2" if MANTISSA == 3 else "e5m2x2")
    else:
        return _by_integers(x, MANTISSA, BIAS)


@triton.jit
def _converted(x, KIND: tl.constexpr):
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite." + KIND + ".f32 a, $2, $1; cvt.rn.satfinite." + KIND + ".f32 b, $4, $3; "
        "mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [x],
        tl.uint8,
        True,
        4,
    )


@triton.jit
def _by_integers(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
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
def _write_rows(
    rows, codes, scale, scale_value, row, code_row, head, seen, kept, D: tl.constexpr, SCALES: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, triton.next_power_of_2(D))[None, :]
    value = tl.load(rows + row[:, None] + dim, mask=seen[:, None] & (dim < D), other=0.0).to(tl.float32)
    divisor = scale_value
    if SCALES > 1:
        divisor = tl.load(scale + head, mask=seen, other=1.0)[:, None]
    elif SCALES:
        divisor = tl.load(scale)
    code = fp8_bits(saturating_quotient(value, divisor), MANTISSA, BIAS)
    tl.store(codes + code_row[:, None] + dim, code, mask=kept[:, None] & (dim < D))


@triton.jit
def write_e4m3(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    _write_rows(rows, codes, scale, scale_value, row, code_row, head, seen, kept, D, SCALES, 3, 7)


@triton.jit
def write_e5m2(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    _write_rows(rows, codes, scale, scale_value, row, code_row, head, seen, kept, D, SCALES, 2, 15)


KERNELS = {
    torch.float8_e4m3fn: RowKernels(write_e4m3, load_tile),
    torch.float8_e5m2: RowKernels(write_e5m2, load_tile),
}
