"""Cases over two caches: what lies in the second one, of open blocks, and what a query sees of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from ..formats.base import LayerCache
from ..formats.registry import format_of
from .case import Case
from .stored import layer_cache, stored_as, unused_planes


def recent_cache(
    case: Case, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], generator: torch.Generator
) -> tuple[LayerCache, torch.Tensor]:
    """A poisoned cache of the model's dtype with the rows that the step finds there, and its table: garbage but for the
    blocks that a sequence's new tokens read there."""
    size, native = case.block_size, case.but(kv_cache_dtype="auto")
    columns = [_columns(case, row) for row in range(len(keys))]
    count = sum(map(len, columns))
    ids = 1 + torch.randperm(count + 1, generator=generator).to(torch.int32)
    width = max((-(-n // size) for n in case.seq_lens), default=0) + 1
    garbage = torch.tensor([2**31 - 1, -1, -(2**31)], dtype=torch.int32)
    table = garbage[torch.randint(0, 3, (len(keys), width), generator=generator)]
    sides = []
    for side, rows in zip(stored_as(native), (keys, values), strict=True):
        (plane,) = unused_planes(side.rows.planes(rows[0].shape[2], case.dtype), count + 2, native)
        sides.append([plane])
    for row, own in enumerate(columns):
        table[row, own], ids = ids[: len(own)], ids[len(own) :]
        there = case.seq_lens[row] - (case.query_lens[row] if case.write else 0)
        for position in (at for column in own for at in range(column * size, min((column + 1) * size, there))):
            block, offset = int(table[row, position // size]), position % size
            for (plane,), rows in zip(sides, (keys, values), strict=True):
                plane[block, offset] = rows[row][position]
    return layer_cache(sides[0], sides[1], "auto"), table


def by_own_block(
    case: Case, query: torch.Tensor, stored: Sequence[torch.Tensor], came: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One sequence's queries, those of a block together, with the keys and values that they see: of their own block, of
    recent ones and of first ones as they came, of others as they are stored."""
    size, first = case.block_size, len(came[0]) - len(query)
    kept = format_of(case.kv_cache_dtype).first_blocks(size) * size
    cuts = [0, *(at for at in range(1, len(query)) if (first + at) % size == 0), len(query)]
    for start, stop in pairwise(cuts):
        begin, end = max(((first + start) // size - blocks_before(case)) * size, 0), max(first + stop, 0)
        low = min(kept, begin)
        key, value = (
            torch.cat((b[:low].to(a.dtype), a[low:begin], b[begin:end].to(a.dtype)))
            for a, b in zip(stored, came, strict=True)
        )
        yield query[start:stop], key, value


def sealed_after(
    case: Case, cache: LayerCache, table: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> LayerCache:
    """The cache of full blocks after the step, in which those that its rows filled, or put behind the window, are
    encoded."""
    sides, size = [], case.block_size
    for side, rows, planes in zip(stored_as(case), (keys, values), cache.sides, strict=True):
        copies = [plane.clone() for plane in planes]
        sides.append(copies)
        for row, length in enumerate(case.seq_lens if case.write else ()):
            positions = (_first_position(case, row), length)
            first, end = (max(position // size - blocks_before(case), 0) for position in positions)
            held = table[row, first:end].long()
            for plane, blocks in zip(copies, side.blocks(rows[row], size, 0), strict=True):
                plane[held] = blocks[first:end]
    return layer_cache(sides[0], sides[1], case.kv_cache_dtype)


def blocks_before(case: Case) -> int:
    """Blocks before a query's own that are not encoded yet."""
    return format_of(case.kv_cache_dtype).recent_blocks(case.block_size)


def _columns(case: Case, row: int) -> list[int]:
    """Of a sequence's blocks those that its new tokens read, or write, as they came."""
    size, end = case.block_size, -(-case.seq_lens[row] // case.block_size)
    first = max(_first_position(case, row) // size - blocks_before(case), 0)
    kept = min(format_of(case.kv_cache_dtype).first_blocks(size), first, end)
    return [*range(kept), *range(first, end)]


def _first_position(case: Case, row: int) -> int:
    """Of a sequence's first new token."""
    return max(case.seq_lens[row] - case.query_lens[row], 0)
