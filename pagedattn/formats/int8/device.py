"""The device half of the int8 format: a scale of a row is a factor of its logit, or of its probability."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..native.device import load_tile
from ..rounding import nearest_even


@triton.jit
def write_row(
    rows, codes, scales, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, triton.next_power_of_2(H)).to(tl.int64)
    dim = tl.arange(0, triton.next_power_of_2(D))
    mask = (head < H)[:, None] & (dim < D)[None, :]
    at = rows + token * s_rt + head[:, None] * s_rh + dim[None, :]
    code, of_row = encode_rows(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    tl.store(codes + block * s_cb + slot * s_cs + head[:, None] * s_ch + dim[None, :], code, mask=mask)
    to = scales + block * SCALE_STRIDES[0] + slot * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
    tl.store(to, of_row, mask=head < H)


@triton.jit
def encode_rows(rows):
    """Codes int8 [H, D] and scales float32 [H] of float32 rows."""
    of_row = tl.div_rn(tl.max(tl.abs(rows), 1), tl.full([rows.shape[0]], 127.0, tl.float32))
    # Up to four significant bits, so that a code times its scale is a float16 but for a power of two.
    upwards = ((of_row.to(tl.int32, bitcast=True) + 0xFFFFF) & 0x7FF00000).to(tl.float32, bitcast=True)
    of_row = tl.where(of_row == of_row, upwards, of_row)  # of the largest bits of NaN the sum would be 0
    of_row = tl.where(of_row == 0, 1.0, of_row)
    code = nearest_even(tl.div_rn(rows, tl.broadcast_to(of_row[:, None], rows.shape)))
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8), of_row


@triton.jit
def row_scale(scales, scale_row, seen):
    """float32 [BLOCK_N] of rows at offsets `scale_row`; 0 where not seen, and None sees all."""
    if seen is not None:
        return tl.load(scales + scale_row, mask=seen, other=0.0)
    else:
        return tl.load(scales + scale_row)


KERNELS = RowKernels(write_row, load_tile, row_scale)
