"""The device half of int4. `format.py` says what is stored, `base.RowKernels` what functions are given."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..bit_packing.device import load_codes, pack, store_codes
from ..hadamard.device import rotate_back
from ..int8.device import row_scale
from ..k8v4.device import encode_rotated
from ..k8v4.device import load_tile as load_values
from ..rounding import divide, nearest_even, nearest_integer
from .format import LARGEST, STEPS

_LARGEST, _STEPS = tl.constexpr(LARGEST), tl.constexpr(float(STEPS))
# Elements of a tile, whatever the block size and the head dim are: few, as programs encode parts side by side.
_ELEMENTS = tl.constexpr(1024)


@triton.jit
def write_keys(
    rows, codes, scales, s_rows, s_codes, s_scales, part, S: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    SLOTS: tl.constexpr = triton.next_power_of_2(S)
    WIDTH: tl.constexpr = max(2, min(triton.next_power_of_2(D), _ELEMENTS // SLOTS))
    slot = tl.arange(0, SLOTS).to(tl.int64)[:, None]
    for first in range(part * WIDTH, D, PARTS * WIDTH):
        dim = first + tl.arange(0, WIDTH)
        mask = (slot < S) & (dim < D)[None, :]
        row = tl.load(rows + slot * s_rows + dim[None, :], mask=mask, other=0.0).to(tl.float32)  # [SLOTS, WIDTH]
        code, step, least = _encode(row, slot < S)
        byte = tl.arange(0, WIDTH // 2)[None, :]
        to = codes + slot * s_codes + first // 2 + byte
        tl.store(to, pack(code, 4), mask=(slot < S) & (first + 2 * byte < D))
        tl.store(scales + dim, step, mask=dim < D)
        tl.store(scales + D + dim, least, mask=dim < D)


@triton.jit
def _encode(row, mask):
    """Codes int32 [SLOTS, WIDTH], steps and least elements float16 [WIDTH], of the rows of `mask` [SLOTS, 1].

    `ChannelSteps.encode` says how. Channels of zeros have codes 0."""
    order = _ordered(row.to(tl.int32, bitcast=True))
    first = tl.min(tl.where(mask, order, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(mask, order, -0x80000000), 0)
    finite = (first >= -0x7F800000) & (last < 0x7F800000)
    row = tl.where(finite[None, :], row, 0.0)
    low = tl.where(finite, _ordered(first).to(tl.float32, bitcast=True), 0.0)
    high = tl.where(finite, _ordered(last).to(tl.float32, bitcast=True), 0.0)
    low = tl.minimum(tl.maximum(low, -_LARGEST), _LARGEST)
    high = tl.minimum(tl.maximum(high, -_LARGEST), _LARGEST)
    grown = tl.maximum(tl.abs(low), tl.abs(high)) * 1.015625
    exponent = tl.maximum((grown.to(tl.int32, bitcast=True) >> 23) - 10, 103)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    per_unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    per_step = tl.full(high.shape, 1 / _STEPS, tl.float32)
    width = divide((high - low) * per_unit, tl.full(high.shape, _STEPS, tl.float32), per_step)
    step = tl.ceil(width - tl.minimum(width * 0.0625, 0.5)) * unit
    least = nearest_even((low + high - step * _STEPS) * (0.5 * per_unit)) * unit
    least = tl.minimum(tl.maximum(least, -_LARGEST), step * -_STEPS + _LARGEST)
    least = tl.where(least == 0, 0.0, least)
    per_step = tl.broadcast_to(tl.where(step == 0, 0.0, 1.0 / step)[None, :], row.shape)
    steps = divide(row - least[None, :], tl.broadcast_to(step[None, :], row.shape), per_step)
    code = nearest_integer(tl.minimum(tl.maximum(steps, 0.0), _STEPS))
    step = tl.where(finite, step.to(tl.float16), tl.full(step.shape, float("nan"), tl.float16))
    return code, step, least.to(tl.float16)


@triton.jit
def _ordered(bits):
    """Of a float32's bits the int32 that is ordered as the numbers are, NaN before and behind them all; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def write_values(
    rows, codes, scales, s_rows, s_codes, s_scales, part, S: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    WIDTH: tl.constexpr = max(2, triton.next_power_of_2(D))
    SLOTS: tl.constexpr = max(1, min(triton.next_power_of_2(S), _ELEMENTS // WIDTH))
    dim = tl.arange(0, WIDTH)
    for first in range(part * SLOTS, S, PARTS * SLOTS):
        slot = first + tl.arange(0, SLOTS).to(tl.int64)
        mask = (slot < S)[:, None] & (dim < D)[None, :]
        row = tl.load(rows + slot[:, None] * s_rows + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        code, of_row = encode_rotated(row, (dim < D)[None, :], D, WIDTH)
        store_codes(code, codes, slot * s_codes, slot < S, D, 4)
        tl.store(scales + slot * s_scales, of_row, mask=slot < S)


@triton.jit
def load_keys(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As of the native format, of rows of one block. A tile's rows that are not seen may name block 0 instead."""
    code = load_codes(codes, row, seen, D, BLOCK_D, 4)
    dim = tl.arange(0, BLOCK_D)
    at = scales + tl.max(scale_row, 0) + dim
    step = tl.load(at, mask=dim < D, other=0.0).to(tl.float32)
    least = tl.load(at + D, mask=dim < D, other=0.0).to(tl.float32)
    return code.to(tl.float32) * step[None, :] + least[None, :]


KEYS = RowKernels(None, load_keys, write_block=write_keys)
VALUES = RowKernels(None, load_values, row_scale, rotate_back, write_block=write_values)
