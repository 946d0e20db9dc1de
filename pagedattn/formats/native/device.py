"""The device half of the native format; what kernels expect of every format's functions is said here.

Rows, and those of codes and scales, are named by their offsets in elements, of codes that are read from a pointer at a
KV head, of scales from the beginning of their plane. `scales` is None where a format has no second plane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..base import RowKernels


@triton.jit
def write_rows(
    rows, codes, scales, scale, scale_value, row, code_row, scale_row, head, seen, kept, D: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Encode rows of D elements at offsets `row` [M] where `seen` [M], of KV heads `head` [M], and store those of them
    that are `kept` [M], a part of them: codes at offsets `code_row`, scales at `scale_row` [M].

    scale: given float32 [SCALES], of all heads or of each; None (SCALES 0): scale_value in its place.
    """
    dim = tl.arange(0, triton.next_power_of_2(D))[None, :]
    value = tl.load(rows + row[:, None] + dim, mask=seen[:, None] & (dim < D))
    tl.store(codes + code_row[:, None] + dim, value, mask=kept[:, None] & (dim < D))


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


KERNELS = RowKernels(write_rows, load_tile)
