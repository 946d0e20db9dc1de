"""How expanded latent attention is cut so that what it allocates stays within a bound: heads, query rows and keys that
are attended to at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..call import lse_dtype
from .mla_forms import LatentDims

Span = tuple[int, int]  # first key of a sequence, and how many
Segments = list[tuple[int, int]]  # query rows and keys, back to back; rows without keys are left out of a call
_LSES = 5  # of a row and head: two states', the merged one, and two that a backend may make on the way to its own


class ExpandedBytes(NamedTuple):
    """Bytes that the expanded form allocates beside the layer's output."""

    row: int  # of a query row and head, where one call attends to all keys: query, the backend's output, LSE
    merged_row: int  # the same, where calls are merged: two states of the wide dtype more
    key: int  # of a key and head: key and value
    cached: int  # of a key: the row that they are made from
    decoded: int  # of a key: what is there while that row is made from a stored one

    @classmethod
    def of(cls, dims: LatentDims, dtype: torch.dtype, stored_width: int | None) -> ExpandedBytes:
        """stored_width: bytes of a row in the cache that has to be decoded; None where it is as it is."""
        _, latent, rope, nope, value = dims
        size, wide = dtype.itemsize, lse_dtype(dtype).itemsize
        row = (nope + rope + value) * size + _LSES * wide
        # A decoded row is bytes and their parts, elements, scaled elements and their parts in float32, and the result.
        decoded = 0 if stored_width is None else 2 * stored_width + (latent + rope) * (3 * wide + size)
        key, cached = (nope + rope + value) * size, (latent + rope) * size
        return cls(row, row + 2 * value * wide, key, cached, decoded)

    def keys_within(self, room: int, heads: int) -> int:
        """How many keys can be expanded at once for so many heads."""
        return max(room, 0) // max(heads * self.key + self.cached, self.decoded)


class Piece(NamedTuple):
    """Query rows of some sequences, which are attended to in turn by groups of heads, over chunks of keys."""

    first_seq: int
    first_row: int
    query_lens: list[int]
    seq_lens: list[int]
    heads: int  # at once
    keys: int  # at once


def plan_pieces(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_heads: int, size: ExpandedBytes, most: int
) -> list[Piece]:
    """Cut a step so that at most `most` bytes are allocated, by heads first: each head's keys are expanded once then.

    As many heads at once are taken as have room for all keys, or leave them half of the bytes. Where rows of one head
    take more than that, rows are cut too. A row and a key of one head are always attended to, whatever they take.
    """
    rows, context = sum(query_lens), sum(max(total - new, 0) for new, total in zip(query_lens, seq_lens, strict=True))
    fresh = sum(min(new, total) for new, total in zip(query_lens, seq_lens, strict=True))
    for heads in (n for n in range(num_heads, 0, -1) if num_heads % n == 0):
        at_once = size.keys_within(most - rows * heads * size.row, heads)
        if at_once and at_once >= fresh and not context:
            return [Piece(0, 0, list(query_lens), list(seq_lens), heads, at_once)]
        taken = rows * heads * size.merged_row
        at_once = size.keys_within(most - taken, heads)
        if at_once and (at_once >= max(fresh, context) or 2 * taken <= most):
            return [Piece(0, 0, list(query_lens), list(seq_lens), heads, at_once)]
    most_rows = max(1, most // 2 // size.merged_row)
    at_once = max(1, size.keys_within(most - most_rows * size.merged_row, 1))
    return [Piece(*part, 1, at_once) for part in _cut_rows(query_lens, seq_lens, most_rows)]


def _cut_rows(
    query_lens: Sequence[int], seq_lens: Sequence[int], most: int
) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Parts of at most `most` query rows: first sequence, first row, and both lengths, as if the sequences ended with
    the part's rows."""
    done = [0] * len(query_lens)
    seq = row = 0
    while seq < len(query_lens):
        first, new, total = seq, [], []
        while seq < len(query_lens) and sum(new) < most:
            taken = min(query_lens[seq] - done[seq], most - sum(new))
            done[seq] += taken
            new.append(taken)
            total.append(max(seq_lens[seq] - (query_lens[seq] - done[seq]), 0))
            if done[seq] < query_lens[seq]:
                break
            seq += 1
        yield first, row, new, total
        row += sum(new)


def plan_chunks(
    query_lens: Sequence[int], seq_lens: Sequence[int], most: int
) -> list[tuple[list[Span], list[tuple[bool, Segments]]]]:
    """Chunks of at most `most` keys: what each takes of every sequence, and the attention calls over it.

    A chunk has keys that were there before the step, which every row sees, or keys of new tokens: rows of the same
    tokens see these causally, later ones all of them, in a second call.
    """
    pairs = list(zip(query_lens, seq_lens, strict=True))
    context = [(0, max(total - new, 0)) for new, total in pairs]
    fresh = [(end, total - end) for (_, end), (_, total) in zip(context, pairs, strict=True)]
    chunks: list[tuple[list[Span], list[tuple[bool, Segments]]]] = []
    for spans in _cut(fresh, most):
        causal: Segments = []
        later: Segments = []
        for (new, total), (first, count) in zip(pairs, spans, strict=True):
            # Rows of a sequence end with its last key; those before `count` keys' own see none of them.
            before = new - (total - first) if count else new
            causal += [(before, 0), (count, count), (new - before - count, 0)]
            later += [(before + count, 0), (new - before - count, count)]
        calls = [(True, _without_nothing(causal))]
        if any(rows and keys for rows, keys in later):
            calls.append((False, _without_nothing(later)))
        chunks.append((spans, calls))
    for spans in _cut(context, most):
        every = [(new, count) for (new, _), (_, count) in zip(pairs, spans, strict=True)]
        chunks.append((spans, [(False, _without_nothing(every))]))
    return chunks


def _cut(ranges: Sequence[Span], most: int) -> list[list[Span]]:
    """Ranges (first, count) in turn, as lists of at most `most` keys, each with one part of every range (or none)."""
    out: list[list[Span]] = []
    room = 0
    for index, (first, count) in enumerate(ranges):
        while count > 0:
            if not room:
                out.append([(0, 0)] * len(ranges))
                room = most
            taken = min(count, room)
            out[-1][index] = (first, taken)
            first, count, room = first + taken, count - taken, room - taken
    return out


def _without_nothing(segments: Segments) -> Segments:
    return [one for one in segments if one != (0, 0)]
