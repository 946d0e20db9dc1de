"""The device half of k8v4's values; those of keys are int8's."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..bit_packing.device import load_codes, store_codes
from ..hadamard.device import FRACTION, rotate_back, rotated_steps, step_size
from ..int8.device import row_scale
from ..rounding import nearest_integer
from .format import HALF_STEPS

_HALF_STEPS = tl.constexpr(float(HALF_STEPS))


@triton.jit
def write_rows(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = max(2, triton.next_power_of_2(D))
    dim = tl.arange(0, WIDTH)[None, :]
    mask = seen[:, None] & (dim < D)
    value = tl.load(rows + row[:, None] + dim, mask=mask, other=0.0).to(tl.float32)
    code, of_row = encode_rotated(value, mask, D, WIDTH)
    store_codes(code, codes, code_row, kept, D, 4)
    tl.store(scales + scale_row, of_row, mask=kept)


@triton.jit
def encode_rotated(row, mask, D: tl.constexpr, WIDTH: tl.constexpr):
    """Codes int32 [M, WIDTH], 0 beyond D, and scales float32 [M]. `RotatedRows4.encode` says how."""
    steps, up, finite = rotated_steps(row, mask, D, WIDTH)
    number = edges_below(tl.abs(steps))
    level = tl.where(mask, 2 * number + 1, 0)
    norm = tl.maximum(tl.sum(level * level, 1), 1)  # 0 of no row
    found = tl.div_rn(tl.sum(nearest_integer(tl.abs(steps)) * level, 1).to(tl.float32), norm.to(tl.float32))
    of_row = tl.where(finite, found * step_size(D, FRACTION) * up, float("nan"))
    mirrored = number ^ (steps.to(tl.int32, bitcast=True) >> 31)  # of negative elements -1 - number
    return tl.where(mask, 8 + mirrored, 0), of_row


@triton.jit
def edges_below(size):
    """int32: how many of the edges 2, 4, ..., 14 half steps between levels sizes [H, WIDTH] have reached; of rows of
    zeros, all seven. Sizes are float32 whole numbers of at most 2**18, as those of elements below 2 are.

    Quotients by a row's largest size are whole, or 2**-19 or more below the next whole number, while what is rounded
    here is off by at most 2**-20 below 7: `bias` is half way between. That was tried for every row and edge."""
    most = tl.max(size, 1)
    per_size = tl.div_rn(tl.full(most.shape, 0.5 * _HALF_STEPS, tl.float32), tl.maximum(most, 1.0))
    bias = tl.where(most > 0, 2.0**-20 - 0.5, 7.0)
    return nearest_integer(tl.minimum(size * per_size[:, None] + bias[:, None], 7.0))


@triton.jit
def load_tile(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    code = load_codes(codes, row, seen, D, BLOCK_D, 4)
    return tl.where(tl.arange(0, BLOCK_D)[None, :] < D, 2 * code - 15, 0).to(tl.int8)


KERNELS = RowKernels(write_rows, load_tile, row_scale, rotate_back)
