"""The device half of latent rows: a row is stored from two tensors, and a tile is loaded as two parts."""

from __future__ import annotations

import triton
import triton.language as tl

from ..fp8.device import fp8_bits
from ..fp8.format import SMALLEST_MAXIMUM
from ..rounding import saturating_quotient
from .deepseek import GROUP as _GROUP
from .deepseek import LATENT as _LATENT
from .deepseek import ROPE as _ROPE
from .deepseek import ROPE_AT as _ROPE_AT
from .deepseek import SCALES_AT as _SCALES_AT

GROUP, LATENT, ROPE = tl.constexpr(_GROUP), tl.constexpr(_LATENT), tl.constexpr(_ROPE)
SCALES_AT, ROPE_AT = tl.constexpr(_SCALES_AT // 4), tl.constexpr(_ROPE_AT // 2)  # float32 and bfloat16 elements
# Weights are multiplied with scales and this, and sums divided by it: with a scale alone, a 448th of a group's largest
# element, they would be subnormal in float16.
UNIT = tl.constexpr(256.0)
LEAST = tl.constexpr(SMALLEST_MAXIMUM)


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
            value = fp8_bits(saturating_quotient(value.to(tl.float32), scale), 3, 7)
        tl.store(row + FIRST + dim, value, mask=mask)


@triton.jit
def load_group(codes, at, seen, g: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of group g of rows of `fp8_ds_mla` at byte offsets `at` [N], as [N, 128] of DTYPE; zeros where not `seen`.

    Zeros come after the conversion: else Triton (3.6, 3.7) moves it behind the change of layout, so that codes are
    converted once for each product that reads them, and no longer copied asynchronously.
    """
    dim = g * GROUP + tl.arange(0, GROUP)
    group = tl.load(codes + dim[None, :] + at[:, None], mask=seen[:, None])
    return tl.where(seen[:, None], group.to(DTYPE), 0.0)


@triton.jit
def load_scale(scales, at, seen, g: tl.constexpr):
    """What these codes are multiplied with, float32 [N]; zeros where not `seen`."""
    return tl.load(scales + SCALES_AT + g + at // 4, mask=seen, other=0.0)


@triton.jit
def load_rope_bits(halves, at, seen, DTYPE: tl.constexpr):
    """Their rotated part, [N, 64]. By integers: the interpreter has no bfloat16."""
    dim = tl.arange(0, ROPE)
    bits = tl.load(halves + ROPE_AT + dim[None, :] + at[:, None] // 2, mask=seen[:, None], other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def write_groups(latent, k_pe, codes, scales, halves, at):
    """Store a token's row of `fp8_ds_mla` at byte offset `at`."""
    group = tl.arange(0, LATENT // GROUP)
    dim = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [4, 128]
    x = tl.load(latent + dim).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), LEAST), tl.full([LATENT // GROUP], 448.0, tl.float32))
    tl.store(codes + at + dim, fp8_bits(saturating_quotient(x, scale[:, None]), 3, 7))
    tl.store(scales + at // 4 + SCALES_AT + group, scale)
    rotated = tl.arange(0, ROPE)
    bits = tl.load(k_pe + rotated).to(tl.float32).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even
    tl.store(halves + at // 2 + ROPE_AT + rotated, rounded.to(tl.int16))
