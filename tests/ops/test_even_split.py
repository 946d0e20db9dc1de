"""The device code that spreads a step's tiles over programs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from pagedattn.kernels.even_split import first_tile_of, program_of


@triton.jit
def _spread(firsts, programs_of, programs, total, COUNT: tl.constexpr, TILES: tl.constexpr):
    for at in range(COUNT):
        tl.store(firsts + at, first_tile_of(tl.cast(at, tl.int32), programs, total))
    for at in range(TILES):
        tl.store(programs_of + at, program_of(tl.cast(at, tl.int32), programs, total), mask=at < total)


def spread(programs: int, total: int, device: torch.device) -> tuple[list[int], list[int]]:
    """The first tile of each program and of the one behind the last, and the program of each tile."""
    firsts = torch.zeros(programs + 1, dtype=torch.int32, device=device)
    owners = torch.full((max(total, 1),), -1, dtype=torch.int32, device=device)
    _spread[(1,)](firsts, owners, programs, total, COUNT=programs + 1, TILES=total)  # type: ignore[arg-type]
    return firsts.tolist(), owners.tolist()[:total]


@pytest.mark.parametrize("programs", [1, 2, 7, 66])
@pytest.mark.parametrize("total", [0, 1, 2, 6, 7, 8, 13, 65, 67, 129, 400])
def test_ranges_cover_all_tiles_and_differ_by_one_at_most(programs: int, total: int, device: torch.device) -> None:
    firsts, owners = spread(programs, total, device)
    ends = [min(first, total) for first in firsts]
    sizes = [end - start for start, end in pairwise(ends)]
    assert ends[0] == 0 and sum(sizes) == total
    used = min(programs, total)
    assert max(sizes) - min(sizes[:used], default=0) <= 1 and not any(sizes[used:])
    assert owners == [program for program, size in enumerate(sizes) for _ in range(size)]


def test_each_program_has_one_tile_of_keys_where_there_are_as_many(device: torch.device) -> None:
    """An item's overhead counts for a tile: two items of 32 tiles over 64 programs."""
    firsts, _ = spread(64, 66, device)
    overheads = [0, 33]
    keys = [sum(tile not in overheads for tile in range(start, end)) for start, end in pairwise(firsts)]
    assert keys == [1] * 64
