"""The device half of the native format; what kernels expect of every format's functions is said here.

Rows of codes and scales are named by their offsets in elements: of codes from a pointer that already stands at a KV
head, of scales from the beginning of their plane. `scales` is None where a format has no second plane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels


@triton.jit
def write_row(
    rows, codes, scales, scale, scale_value, s_rt, s_rh, s_cb, s_cs, s_ch, token, block, slot,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store a token's rows, H heads of D elements at rows + token * s_rt + head * s_rh, in a slot of a block of codes,
    whose strides by block, slot and head are s_cb, s_cs and s_ch; those of scales are SCALE_STRIDES.

    scale: given float32 [SCALES], 1 or H elements; None (SCALES 0): scale_value in its place.
    """
    N: tl.constexpr = triton.next_power_of_2(H * D)
    index = tl.arange(0, N)  # [N] over heads and dims
    head, dim = (index // D).to(tl.int64), index % D  # a stride may be past 2**31 elements
    mask = index < H * D
    value = tl.load(rows + token * s_rt + head * s_rh + dim, mask=mask)
    tl.store(codes + block * s_cb + slot * s_cs + head * s_ch + dim, value, mask=mask)


@triton.jit
def load_tile(codes, row, scales, scale_row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The tile [BLOCK_N, BLOCK_D] of rows at offsets `row` [BLOCK_N], zero beyond D; scale_row: of their scales.

    seen [BLOCK_N]: rows to load, zeros elsewhere; None: all may be loaded.
    """
    dim = tl.arange(0, BLOCK_D)
    at = codes + dim[None, :] + row[:, None]
    if seen is not None:
        return tl.load(at, mask=seen[:, None] & (dim < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)


KERNELS = RowKernels(write_row, load_tile)
