"""The device half of the int8 format: a scale of a row is a factor of its logit, or of its probability."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..native.device import load_tile
from ..rounding import divide, nearest_integer, powers_of_two


@triton.jit
def write_rows(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, triton.next_power_of_2(D))[None, :]
    value = tl.load(rows + row[:, None] + dim, mask=seen[:, None] & (dim < D), other=0.0).to(tl.float32)
    code, of_row = encode_rows(value)
    tl.store(codes + code_row[:, None] + dim, code, mask=kept[:, None] & (dim < D))
    tl.store(scales + scale_row, of_row, mask=kept)


@triton.jit
def encode_rows(rows):
    """Codes int8 [M, D] and scales float32 [M] of float32 rows."""
    largest = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of bits, in which NaN is larger than numbers
    of_row = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, 127.0, tl.float32))
    # Up to four significant bits, so that a code times its scale is a float16 but for a power of two.
    upwards = ((of_row.to(tl.int32, bitcast=True) + 0xFFFFF) & 0x7FF00000).to(tl.float32, bitcast=True)
    of_row = tl.where(of_row == of_row, upwards, of_row)  # of the largest bits of NaN the sum would be 0
    of_row = tl.where(of_row == 0, 1.0, of_row)
    # Rows and scales are divided by a power of two first, so that quotients are found by products.
    _, down = powers_of_two(largest)
    finite = largest < 0x7F800000
    step = tl.where(finite, of_row * down, 1.0)
    per_step = tl.where(finite, 1.0 / step, 0.0)
    steps = divide(rows * down[:, None], step[:, None], per_step[:, None])
    return nearest_integer(tl.maximum(steps, -127.0)).to(tl.int8), of_row  # NaN becomes -127


@triton.jit
def row_scale(scales, scale_row, seen):
    """float32 [BLOCK_N] of rows at offsets `scale_row`; 0 where not seen, and None sees all."""
    if seen is not None:
        return tl.load(scales + scale_row, mask=seen, other=0.0)
    else:
        return tl.load(scales + scale_row)


KERNELS = RowKernels(write_rows, load_tile, row_scale)
