"""Triton: which token of its item and which head of its pack a row of a tile is.

Heads of a token follow each other, a power of two of them, some of which may be nobody's. Of packs of another size
eight tokens of a head do, and then the same eight of the next head: rows come to shared memory by copies of eight, and
no head is padding. 16 such copies are a tile: of 5 heads 24 tokens, where 8 padded ones have 16, of 3 heads 40 for 32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_of(row, PACK: tl.constexpr):
    """Of rows of a tile of PACK heads, counted from its first one."""
    return row // (8 * PACK) * 8 + row % 8 if PACK & (PACK - 1) != 0 else row // PACK


@triton.jit
def head_of(row, PACK: tl.constexpr):
    """Of rows of a tile of PACK heads."""
    return row // 8 % PACK if PACK & (PACK - 1) != 0 else row % PACK
