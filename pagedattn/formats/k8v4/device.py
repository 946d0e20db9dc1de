"""The device half of k8v4's values; those of keys are int8's."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..hadamard.device import hadamard, rotate_back, signs
from ..int8.device import row_scale
from .format import FRACTION, HALF_STEPS, step_size, steps_per_unit

_HALF_STEPS, _FRACTION = tl.constexpr(HALF_STEPS), tl.constexpr(FRACTION)
_steps_per_unit = triton.constexpr_function(steps_per_unit)
_step_size = triton.constexpr_function(step_size)


@triton.jit
def write_row(
    rows, codes, scales, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = triton.next_power_of_2(H)
    WIDTH: tl.constexpr = max(2, triton.next_power_of_2(D))
    head = tl.arange(0, HEADS).to(tl.int64)
    dim, pair = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2)
    mask = (head < H)[:, None] & (dim < D)[None, :]
    row = tl.load(rows + token * s_rt + head[:, None] * s_rh + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    code, of_row = _encode(row, mask, D, WIDTH)
    low, high = tl.split(tl.reshape(code, (HEADS, WIDTH // 2, 2)))
    to = codes + block * s_cb + slot * s_cs + head[:, None] * s_ch + pair[None, :]
    tl.store(to, (low | high << 4).to(tl.uint8), mask=(head < H)[:, None] & (2 * pair < D)[None, :])
    to_scale = scales + block * SCALE_STRIDES[0] + slot * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
    tl.store(to_scale, of_row, mask=head < H)


@triton.jit
def _encode(row, mask, D: tl.constexpr, WIDTH: tl.constexpr):
    """Codes int32 [H, WIDTH], 0 beyond D, and scales float32 [H]. `RotatedRows4.encode` says how."""
    # The largest of bits, in which NaN is larger than all numbers.
    largest = tl.max(row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    turned = hadamard(row * down[:, None] * signs(tl.arange(0, WIDTH))[None, :], D, WIDTH)
    turned = tl.where(mask & finite[:, None], turned, 0.0)
    # Below 2**22 an addition of 1.5 * 2**23 leaves float32 no digits behind the point.
    steps = ((turned * _steps_per_unit(D, _FRACTION) + 12582912.0) - 12582912.0).to(tl.int32)
    size = tl.abs(steps)  # below 2**18, as are elements below 2
    most = tl.max(size, 1)
    number = tl.zeros(steps.shape, tl.int32)
    for edge in tl.static_range(2, 16, 2):
        number += (size * _HALF_STEPS >= (most * edge)[:, None]).to(tl.int32)
    level = tl.where(mask, 2 * number + 1, 0)
    norm = tl.maximum(tl.sum(level * level, 1), 1)  # 0 of no head
    found = tl.div_rn(tl.sum(size * level, 1).to(tl.float32), norm.to(tl.float32))
    of_row = tl.where(finite, found * _step_size(D, _FRACTION) * up, float("nan"))
    return tl.where(mask, tl.where(steps < 0, 7 - number, 8 + number), 0), of_row


@triton.jit
def load_tile(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    pair = tl.arange(0, BLOCK_D // 2)
    at = codes + pair[None, :] + row[:, None]
    some = (2 * pair < D)[None, :] & (row >= 0)[:, None]
    if seen is not None:
        some = some & seen[:, None]
    packed = tl.load(at, mask=some, other=0).to(tl.int32)
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (row.shape[0], BLOCK_D))
    return tl.where(tl.arange(0, BLOCK_D)[None, :] < D, 2 * code - 15, 0).to(tl.int8)


KERNELS = RowKernels(write_row, load_tile, row_scale, rotate_back)
