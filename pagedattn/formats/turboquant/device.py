"""The device half of TurboQuant. `format.py` says what is stored, `native/device.py` what functions are given."""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels
from ..bit_packing.device import load_codes, store_codes
from ..bit_packing.packing import bytes_of
from ..hadamard.device import FRACTION, rotate, rotate_back, rotated_steps, step_size
from ..rounding import nearest_integer
from . import codebook
from .format import LARGEST

_LARGEST = tl.constexpr(LARGEST)
_LEVELS, _UNITS = tl.constexpr(codebook.LEVELS), tl.constexpr(codebook.UNITS)
_LINEAR, _CUBIC, _SHIFT = tl.constexpr(codebook.LINEAR), tl.constexpr(codebook.CUBIC), tl.constexpr(codebook.SHIFT)
_bytes_of = triton.constexpr_function(bytes_of)
_edge_of = triton.constexpr_function(codebook.edge_of)


@triton.jit
def _level(code, BITS: tl.constexpr):
    """Of codes int32, by the curve that `codebook.py` describes."""
    t = 2 * code - ((1 << BITS) - 1)
    if BITS == 4:  # as a square, which takes fewer operations
        HALF: tl.constexpr = _CUBIC // 2
        curve = t * t + HALF
        curve = curve * curve + (_LINEAR[BITS] - HALF * HALF)
    else:
        curve = t * t + _LINEAR[BITS]
    return (t * curve + (1 << _SHIFT[BITS] - 1)) >> _SHIFT[BITS]


@triton.jit
def _encode(row, mask, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [M, WIDTH], 0 beyond D, and factors float16 [M]. `TurboQuantRows.encode` says how."""
    HALF: tl.constexpr = 1 << BITS - 1
    steps, up, finite = rotated_steps(row, mask, D, WIDTH)
    wide = nearest_integer(steps).to(tl.int64)
    length = tl.sqrt_rn(tl.sum(wide * wide, 1).to(tl.float32))
    size = tl.abs(steps)
    number = tl.zeros(steps.shape, tl.int32)
    for at in tl.static_range(HALF - 1):
        number += (size >= (length * _edge_of(_LEVELS[BITS], _UNITS[BITS], at, D))[:, None]).to(tl.int32)
    code = tl.where(steps < 0, HALF - 1 - number, HALF + number)
    level = tl.where(mask, _level(code, BITS), 0)
    of_levels = tl.sqrt_rn(tl.maximum(tl.sum(level * level, 1), 1).to(tl.float32))  # 0 of no row
    factor = tl.minimum(tl.div_rn(length, of_levels) * step_size(D, FRACTION) * up, _LARGEST)
    return tl.where(mask, code, 0), tl.where(finite, factor, float("nan")).to(tl.float16)


@triton.jit
def _write(
    rows, codes, scales, row, code_row, scale_row, seen, kept, D: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    WIDTH: tl.constexpr = max(8, triton.next_power_of_2(D))
    dim = tl.arange(0, WIDTH)[None, :]
    mask = seen[:, None] & (dim < D)
    value = tl.load(rows + row[:, None] + dim, mask=mask, other=0.0).to(tl.float32)
    code, factor = _encode(value, mask, D, WIDTH, BITS)
    if BITS == 3:
        store_codes(code & 3, codes, code_row, kept, D, 2)
        store_codes(code >> 2, codes + _bytes_of(D, 2), code_row, kept, D, 1)
    else:
        store_codes(code, codes, code_row, kept, D, BITS)
    tl.store(scales + scale_row, factor, mask=kept)


@triton.jit
def _load(codes, row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """Levels int8 [BLOCK_N, BLOCK_D], 0 beyond D."""
    if BITS == 3:
        code = load_codes(codes, row, seen, D, BLOCK_D, 2)
        code = code | load_codes(codes + _bytes_of(D, 2), row, seen, D, BLOCK_D, 1) << 2
    else:
        code = load_codes(codes, row, seen, D, BLOCK_D, BITS)
    return tl.where(tl.arange(0, BLOCK_D)[None, :] < D, _level(code, BITS), 0).to(tl.int8)


@triton.jit
def row_scale(scales, scale_row, seen):
    """float32 [BLOCK_N] of rows at offsets `scale_row`; 0 where not seen, and None sees all."""
    if seen is not None:
        return tl.load(scales + scale_row, mask=seen, other=0.0).to(tl.float32)
    else:
        return tl.load(scales + scale_row).to(tl.float32)


@triton.jit
def write_rows_4(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    _write(rows, codes, scales, row, code_row, scale_row, seen, kept, D, 4)


@triton.jit
def write_rows_3(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    _write(rows, codes, scales, row, code_row, scale_row, seen, kept, D, 3)


@triton.jit
def write_rows_2(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    _write(rows, codes, scales, row, code_row, scale_row, seen, kept, D, 2)


@triton.jit
def load_tile_4(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return _load(codes, row, seen, D, BLOCK_D, 4)


@triton.jit
def load_tile_3(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return _load(codes, row, seen, D, BLOCK_D, 3)


@triton.jit
def load_tile_2(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return _load(codes, row, seen, D, BLOCK_D, 2)


_STORED = {2: (write_rows_2, load_tile_2), 3: (write_rows_3, load_tile_3), 4: (write_rows_4, load_tile_4)}
KEY_KERNELS = {bits: RowKernels(*both, row_scale, rotate) for bits, both in _STORED.items()}
VALUE_KERNELS = {bits: RowKernels(*both, row_scale, rotate_back) for bits, both in _STORED.items()}
