"""Triton: the tokens that a program copies: where they lie in the cache, and what is written of the copy's table."""

from __future__ import annotations

import triton
import triton.language as tl

from ..masking import end_key, first_encoded, stops_early


@triton.jit
def tokens_of(
    table, seq_lens, to_table, num_blocks, columns, s_table, S: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Of tokens program_id(0) * TOKENS and so on of sequence program_id(1), [TOKENS] each: their numbers in all of the
    copy, blocks, slots, whether these are in the cache, and whether a query may see them: others may not be encoded
    yet. Programs of head 0, program_id(2), write the table."""
    seq = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column, slot = token // S, token % S
    seq_len = tl.load(seq_lens + seq)
    inside = (column < columns) & (token < seq_len)
    block = tl.load(table + seq * s_table + column, mask=inside, other=-1).to(tl.int64)
    known = (block >= 0) & (block < num_blocks)
    if tl.program_id(2) == 0:  # a block that is not in the cache is not in the copy either
        own = seq * columns + column
        tl.store(to_table + own, tl.where(known, own, -1).to(tl.int32), mask=(slot == 0) & (column < columns))
    # Some block of the cache. By a `where` of known ones Triton fails to choose layouts for heads of 64.
    block = tl.maximum(tl.minimum(block, num_blocks - 1), 0)
    seen = known
    if stops_early(MASK):
        seen = known & (token >= first_encoded(MASK)) & (token < end_key(seq_len - 1, seq_len, MASK))
    return seq * columns * S + token, block, slot, known, seen
