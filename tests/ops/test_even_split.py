"""The device code that spreads a step's tiles over programs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pagedattn.kernels.even_split import first_tile_of, program_of, whole_shares


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


@triton.jit
def _whole_shares(found, work, share, programs, TILE_OVERHEAD: tl.constexpr, N: tl.constexpr):
    items = tl.load(work + tl.arange(0, N))
    whole, shares, count = whole_shares(items, share, programs, TILE_OVERHEAD)  # type: ignore[misc]
    tl.store(found, whole)
    tl.store(found + 1, count)
    tl.store(found + 2 + tl.arange(0, N), shares)


def whole(
    work: tuple[int, ...], share: int, programs: int, device: torch.device, tile_overhead: int = 0
) -> tuple[int, int, list[int]]:
    """Tiles of a whole share, the number of shares, and of each item."""
    found = torch.zeros(2 + len(work), dtype=torch.int32, device=device)
    items = torch.tensor(work, dtype=torch.int32, device=device)
    constants: dict[str, Any] = {"TILE_OVERHEAD": tile_overhead, "N": len(work)}
    _whole_shares[(1,)](found, items, share, programs, **constants)  # type: ignore[arg-type]
    return int(found[0]), int(found[1]), found[2:].tolist()


@pytest.mark.parametrize("tile_overhead", [0, 2])
@pytest.mark.parametrize("programs", [4, 5, 6, 16, 33])
@pytest.mark.parametrize(
    "work",
    [(3, 3, 3, 0), (8, 8, 8, 8), (4, 5, 7, 10), (5, 0, 0, 0), (0, 61, 1, 7), (157, 157, 157, 0), (16, 90, 401, 33)],
    ids=str,
)
def test_whole_shares_are_as_many_as_programs(
    work: tuple[int, ...], programs: int, tile_overhead: int, device: torch.device
) -> None:
    """Of shares that are longer by an eighth at most, rounded up, or by an item's overhead, one for which there are
    programs enough, if there is."""
    share = -(-sum(work) // programs)
    tiles, count, shares = whole(work, share, programs, device, tile_overhead)
    assert shares == [-(-n // tiles) for n in work] and count == sum(shares)
    longest = share + max(-(-share // 8), tile_overhead)
    fitting = [s for s in range(share, longest + 1) if sum(-(-n // s) for n in work) <= programs]
    assert tiles in fitting if fitting else count > programs
    assert share not in fitting or tiles == share


def test_shares_are_no_longer_than_as_many_programs_need(device: torch.device) -> None:
    """Three items of 157 tiles by 16 programs: 30 tiles a share are too few, 34 as many as an eighth more allows, and
    32 enough for five programs each."""
    assert whole((157, 157, 157, 0), 30, 16, device) == (32, 15, [5, 5, 5, 0])
