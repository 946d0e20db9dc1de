"""Packing as device code; `packing.py` says what it is. Neighbours are combined or taken apart, in each round of all
elements, so that a tile stays in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def rounds_of(bits):
    """In which codes of 1, 2 or 4 bits become bytes."""
    return 4 - bits.bit_length()


@triton.jit
def pack(codes, BITS: tl.constexpr):
    """Codes int32 [M, N] as bytes uint8 [M, N * BITS / 8]."""
    for at in tl.static_range(rounds_of(BITS)):
        low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        codes = low | high << (BITS << at)
    return codes.to(tl.uint8)


@triton.jit
def unpack(packed, BITS: tl.constexpr):
    """Bytes int32 [M, N] as codes int32 [M, N * 8 / BITS]."""
    for at in tl.static_range(rounds_of(BITS)):
        both = tl.join(packed & ((1 << (4 >> at)) - 1), packed >> (4 >> at))
        packed = tl.reshape(both, (packed.shape[0], 2 * packed.shape[1]))
    return packed


@triton.jit
def load_codes(codes, row, seen, D: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [BLOCK_N, BLOCK_D] of rows whose bytes begin at offsets `row`; those beyond D have no meaning.

    seen [BLOCK_N]: rows to load, zeros elsewhere; None: all may be loaded.
    """
    COUNT: tl.constexpr = 8 // BITS
    byte = tl.arange(0, BLOCK_D // COUNT)
    at = codes + byte[None, :] + row[:, None]
    # By whole bytes: of a multiple of them the compiler does not see that they are loaded 16 at a time.
    some = (byte < (D + COUNT - 1) // COUNT)[None, :] & (row >= 0)[:, None]
    if seen is not None:
        some = some & seen[:, None]
    return unpack(tl.load(at, mask=some, other=0).to(tl.int32), BITS)


@triton.jit
def store_codes(code, codes, row, kept, D: tl.constexpr, BITS: tl.constexpr):
    """Write int32 [M, WIDTH], 0 beyond D, as bytes from offsets `row` [M] on, of rows that are `kept` [M]."""
    COUNT: tl.constexpr = 8 // BITS
    byte = tl.arange(0, code.shape[1] // COUNT)[None, :]
    tl.store(codes + row[:, None] + byte, pack(code, BITS), mask=kept[:, None] & (COUNT * byte < D))
