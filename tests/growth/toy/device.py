"""The device half of the toy format; `pagedattn/formats/native/device.py` says what each function is given."""

# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from pagedattn.formats.base import RowKernels
from pagedattn.formats.int8.device import encode_rows, row_scale
from pagedattn.formats.native.device import load_tile

OPEN = tl.constexpr(0.5)
ROOT_HALF = tl.constexpr(0.70710678)
ROUND = tl.constexpr(12582912.0)  # added and taken away, it leaves the nearest integer


@triton.jit
def rotate(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D] by pairs of neighbours."""
    M: tl.constexpr = x.shape[0]
    a, b = tl.split(tl.reshape(x.to(tl.float32), (M, BLOCK_D // 2, 2)))
    y = tl.join((a + b) * ROOT_HALF, (a - b) * ROOT_HALF)
    return tl.reshape(y, (M, BLOCK_D)).to(x.dtype)


@triton.jit
def write_key(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, triton.next_power_of_2(D // 2))[None, :]
    there, mask = seen[:, None] & (pair < D // 2), kept[:, None] & (pair < D // 2)
    a = tl.load(rows + row[:, None] + 2 * pair, mask=there, other=0.0).to(tl.float32)
    b = tl.load(rows + row[:, None] + 2 * pair + 1, mask=there, other=0.0).to(tl.float32)
    code = step(a + b) | step(a - b) << 4
    tl.store(codes + code_row[:, None] + pair, code.to(tl.uint8), mask=mask)
    to = scales + scale_row[:, None] + 2 * pair
    tl.store(to, tl.full(a.shape, OPEN, tl.float32), mask=mask)
    tl.store(to + 1, tl.full(a.shape, OPEN, tl.float32), mask=mask)


@triton.jit
def step(x):
    rounded = ((x * ROOT_HALF) / OPEN + ROUND) - ROUND
    return tl.minimum(tl.maximum(rounded, -7.0), 7.0).to(tl.int32) + 8


@triton.jit
def load_keys(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    pair = tl.arange(0, BLOCK_D // 2)[None, :]
    dim = tl.arange(0, BLOCK_D)[None, :]
    some = (pair < D // 2) & (row >= 0)[:, None]
    known = (dim < D) & (row >= 0)[:, None]
    if seen is not None:
        some = some & seen[:, None]
        known = known & seen[:, None]
    packed = tl.load(codes + row[:, None] + pair, mask=some, other=0).to(tl.int32)
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (row.shape[0], BLOCK_D)) - 8
    return code.to(tl.float32) * tl.load(scales + scale_row[:, None] + dim, mask=known, other=0.0)


@triton.jit
def write_value(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = triton.next_power_of_2(D)
    dim = tl.arange(0, WIDTH)[None, :]
    value = tl.load(rows + row[:, None] + dim, mask=seen[:, None] & (dim < D), other=0.0).to(tl.float32)
    code, of_row = encode_rows(rotate(value, D, WIDTH))
    tl.store(codes + code_row[:, None] + dim, code, mask=kept[:, None] & (dim < D))
    tl.store(scales + scale_row, of_row, mask=kept)


KEYS = RowKernels(write_key, load_keys, None, rotate)
VALUES = RowKernels(write_value, load_tile, row_scale, rotate)
