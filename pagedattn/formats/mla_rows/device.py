"""The device half of latent rows: a row is stored from two tensors, and a tile is loaded as two parts."""

from __future__ import annotations

import triton
import triton.language as tl

from ..fp8.device import fp8_bits


@triton.jit
def inside(rows, dim, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements `dim` [BLOCK] of these rows [N] are before COUNT: [N, BLOCK], or [N, 1] where all are."""
    if COUNT == BLOCK:
        return rows[:, None]
    else:
        return rows[:, None] & (dim < COUNT)[None, :]


@triton.jit
def load_part(rows, at, seen, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Elements FIRST..FIRST + COUNT of rows at offsets `at` [N], as [N, BLOCK]; zeros where not `seen` [N]."""
    dim = tl.arange(0, BLOCK)
    return tl.load(rows + FIRST + dim[None, :] + at[:, None], mask=inside(seen, dim, COUNT, BLOCK), other=0.0)


@triton.jit
def write_part(part, row, scale, FIRST: tl.constexpr, COUNT: tl.constexpr, E4M3: tl.constexpr):
    """Store a token's COUNT elements as those of its row from FIRST on; E4M3: as bits of their quotients by `scale`."""
    if COUNT > 0:
        dim = tl.arange(0, triton.next_power_of_2(COUNT))
        mask = dim < COUNT
        value = tl.load(part + dim, mask=mask)
        if E4M3:
            value = fp8_bits(tl.div_rn(value.to(tl.float32), scale), 3, 7)
        tl.store(row + FIRST + dim, value, mask=mask)
