"""The work list of prefill on Hopper where query blocks are too few for all SMs: parts of their keys, each key once."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from pagedattn.ops import hopper_list
from pagedattn.ops.hopper_list import Bounds, Listing, tile_of, tokens_of

SMS = 132


class Entry(NamedTuple):
    token: int
    tokens: int
    position: int
    keys: int
    seq: int
    begin: int
    end: int
    nth: int
    parts: int
    origin: int


def listing(kv_heads: int = 8, group: int = 4, dim: int = 128, **changes: int) -> Listing:
    values = {"causal": True, "window": 0, "max_keys": 1 << 20, "num_sms": SMS, **changes}
    return Listing(kv_heads, group, dim, **values)  # type: ignore[arg-type]


def bounds(query_lens: list[int]) -> Bounds:
    return Bounds(sum(query_lens), len(query_lens), 0, max(query_lens), 1 << 20)


def listed(of: Listing, query_lens: list[int], seq_lens: list[int], device: torch.device) -> list[Entry]:
    """Entries in order; queries start at row 3."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32) + 3
    items = hopper_list.new_items(of, bounds(query_lens), device)
    assert items.shape[1] == hopper_list.PART_FIELDS
    items.fill_(7)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    hopper_list.list_items(of, items, starts.to(device), lens)
    assert not items[0, :2].any(), "the counters that hand items out start at zero"
    count = int(items[1, 0])
    assert (items[2 + count :] == 7).all()
    return [Entry(*entry[:10]) for entry in items[2 : 2 + count].tolist()]


def spans(of: Listing, query_lens: list[int], seq_lens: list[int]) -> dict[int, tuple[int, int, int, int, int, int]]:
    """By first token: tokens, position, keys, sequence, and the tiles that any row of a block sees.
    Where none does, an entry of one tile is for its rows to be written."""
    found, start, block_q, tile = {}, 3, tokens_of(of.group), tile_of(of.head_dim)
    for seq, (queries, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for done in range(0, queries, block_q):
            tokens, position, room = min(block_q, queries - done), keys - queries + done, min(keys, of.max_keys)
            seen = set()
            for row in range(position, position + tokens):
                last = row if of.causal else row + of.window - 1 if of.window else room
                first = row - of.window + 1 if of.window else 0
                seen |= {key // tile for key in range(max(first, 0), min(last + 1, room))}
            low, high = (min(seen), max(seen) + 1) if seen else (0, 0)
            found[start + done] = tokens, position, room, seq, low, high
        start += queries
    return found


def drawn(seed: int) -> tuple[Listing, list[int], list[int]]:
    """Heads, and lengths of sequences whose items may be parts."""
    draw = random.Random(seed)
    while True:
        of = listing(draw.choice((1, 2, 8)), draw.choice((1, 4, 5, 8)), draw.choice((64, 256)))
        of = of._replace(causal=draw.random() < 0.7, window=draw.choice((0, 0, 100, 3000)))
        of = of._replace(max_keys=draw.choice((1 << 20, 1 << 20, 5000)), num_sms=draw.choice((4, SMS, SMS)))
        query_lens = [draw.choice((0, 1, 5, 33, 100)) for _ in range(draw.choice((1, 2, 3)))]
        if hopper_list.in_parts(of, bounds(query_lens)):
            return of, query_lens, [draw.choice((n, n + 700, 6000, 9000)) for n in query_lens]


@pytest.mark.parametrize("seed", range(25))
def test_every_tile_once(seed: int, device: torch.device) -> None:
    of, query_lens, seq_lens = drawn(seed)
    entries = listed(of, query_lens, seq_lens, device)
    by_block = defaultdict(list)
    for entry in entries:
        by_block[entry.token].append(entry)
    wanted, places = spans(of, query_lens, seq_lens), set()
    assert by_block.keys() == wanted.keys()
    for token, parts in by_block.items():
        tokens, position, keys, seq, low, high = wanted[token]
        parts.sort(key=lambda entry: entry.nth)
        assert {entry[1:5] for entry in parts} == {(tokens, position, keys, seq)}
        assert {(entry.parts, entry.origin) for entry in parts} == {(len(parts), parts[0].origin)}
        assert [entry.nth for entry in parts] == list(range(len(parts)))
        tiles = [tile for entry in parts for tile in range(entry.begin, entry.end)]
        assert tiles == list(range(low, high)) or (low == high and len(tiles) == 1)
        if len(parts) > 1:
            mine = set(range(parts[0].origin, parts[0].origin + len(parts)))
            assert not mine & places, "two blocks leave their states in one place"
            places |= mine
    assert len(places) * of.heads <= of.places
    lengths = [entry.end - entry.begin for entry in entries]
    cut = [entry for entry in entries if entry.parts > 1]
    if cut:
        step = max(entry.end - entry.begin for entry in cut)
        assert lengths == sorted(lengths, key=lambda n: n != step), "parts of full length come first"


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "changes", "units"),
    [
        ([16] * 8, [4096] * 8, {}, 128),  # 64 blocks of 32 tiles
        ([100], [32768], {}, 128),  # 32 of 256
        ([16], [32768], {}, None),
        ([100], [32768], {"kv_heads": 1, "group": 8}, None),
        ([512], [32768], {}, 128),  # for each SM one
        ([40] * 8, [2048] * 8, {}, 128),
    ],
)
def test_sms_are_busy(
    query_lens: list[int], seq_lens: list[int], changes: dict[str, int], units: int | None, device: torch.device
) -> None:
    of = listing(**changes)
    entries = listed(of, query_lens, seq_lens, device)
    found = len(entries) * of.heads
    assert units is None or found == units
    assert 90 <= found <= 2 * SMS


@pytest.mark.parametrize("query_lens", [[0], [0, 0, 0]])
def test_nothing_to_do(query_lens: list[int], device: torch.device) -> None:
    assert listed(listing(), query_lens, [5] * len(query_lens), device) == []
