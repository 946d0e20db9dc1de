"""The work list of prefill on Hopper where query blocks are too few for all SMs: parts of their keys, each key once."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.prefill_sm90.plan import TileSchedulerParams, keys_per_tile, tokens_per_tile
from pagedattn.kernels.prefill_sm90.tile_schedule import fill_tile_schedule
from pagedattn.kernels.shape import BatchBounds

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


def listing(kv_heads: int = 8, group: int = 4, dim: int = 128, **changes: int) -> TileSchedulerParams:
    values = {"mask": (1, 0), "max_keys": 1 << 20, "num_sms": SMS, **changes}
    return TileSchedulerParams(kv_heads, group, dim, **values)  # type: ignore[arg-type]


def bounds(query_lens: list[int]) -> BatchBounds:
    return BatchBounds(sum(query_lens), len(query_lens), 0, max(query_lens), 1 << 20)


def listed(of: TileSchedulerParams, query_lens: list[int], seq_lens: list[int], device: torch.device) -> list[Entry]:
    """Entries in order; queries start at row 3."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32) + 3
    shape = sm90.schedule_shape(of, bounds(query_lens))
    assert shape[1] == sm90.SPLIT_FIELDS
    around = torch.full((32 + shape[0] + 32, shape[1]), 7, dtype=torch.int32, device=device)
    items = around[32:-32]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    fill_tile_schedule(of, items, starts.to(device), lens)
    assert not items[0, :2].any(), "the counters that hand items out start at zero"
    count, blocks = items[1, :2].tolist()
    assert (around[:32] == 7).all() and (around[34 + count :] == 7).all() and (items[2:, 14:] == 7).all()
    assert (items[2 + blocks :, 10:] == 7).all()
    entries = [Entry(*entry[:10]) for entry in items[2 : 2 + count].tolist()]
    cut = {(entry.token, entry.tokens, entry.parts, entry.origin) for entry in entries if entry.parts > 1}
    assert {tuple(block) for block in items[2 : 2 + blocks, 10:14].tolist()} == cut, "blocks to add up"
    assert blocks == len(cut)
    return entries


def spans(
    of: TileSchedulerParams, query_lens: list[int], seq_lens: list[int]
) -> dict[int, tuple[int, int, int, int, int, int]]:
    """By first token: tokens, position, keys, sequence, and the tiles that any row of a block sees.
    Where none does, an entry of one tile is for its rows to be written."""
    (causal, window), found = of.mask, {}
    start, block_q, tile = 3, tokens_per_tile(of.pack), keys_per_tile(of.head_dim)
    for seq, (queries, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for done in range(0, queries, block_q):
            tokens, position, room = min(block_q, queries - done), keys - queries + done, min(keys, of.max_keys)
            seen = set()
            for row in range(position, position + tokens):
                last = row if causal else row + window - 1 if window else room
                first = row - window + 1 if window else 0
                seen |= {key // tile for key in range(max(first, 0), min(last + 1, room))}
            low, high = (min(seen), max(seen) + 1) if seen else (0, 0)
            found[start + done] = tokens, position, room, seq, low, high
        start += queries
    return found


def drawn(seed: int) -> tuple[TileSchedulerParams, list[int], list[int]]:
    """Heads, and lengths of sequences whose items may be parts."""
    draw = random.Random(seed)
    while True:
        of = listing(draw.choice((1, 2, 8)), draw.choice((1, 4, 5, 8)), draw.choice((64, 256)))
        of = of._replace(mask=(int(draw.random() < 0.7), draw.choice((0, 0, 100, 3000))))
        of = of._replace(max_keys=draw.choice((1 << 20, 1 << 20, 5000)), num_sms=draw.choice((4, 16, 30, SMS, SMS)))
        query_lens = [draw.choice((0, 1, 5, 33, 129, 635)) for _ in range(draw.randint(1, 8))]
        if sm90.splits_kv(of, bounds(query_lens)):
            return of, query_lens, [draw.choice((0, n // 2, n, n + 700, 6000, 9000)) for n in query_lens]


@pytest.mark.parametrize("seed", range(40))
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
    assert len(places) * of.heads <= of.max_partials
    cut = [entry for entry in entries if entry.parts > 1]
    if cut:
        step = max(entry.end - entry.begin for entry in cut)
        in_front = [entry.parts == 1 or entry.end - entry.begin == step for entry in entries]
        first_rest = in_front.index(False) if False in in_front else len(entries)
        assert all(
            entry.parts == 1 for entry, front in zip(entries[first_rest:], in_front[first_rest:], strict=True) if front
        )


def makespan(entries: list[Entry], heads: int) -> float:
    """When the last SM is done, in tiles, where items are handed out in order and each costs 1.5 by itself."""
    done = [0.0] * SMS
    for entry in entries:
        for _ in range(heads):
            heapq.heappush(done, heapq.heappop(done) + entry.end - entry.begin + 1.5)
    return max(done)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "changes", "at_most"),
    [
        ([16] * 8, [4096] * 8, {}, 17.5),  # 64 blocks of 32 tiles; 15.5 if all SMs were busy to the end
        ([100], [32768], {}, 65.5),  # 32 of 256: 62.1
        ([16], [32768], {}, 23.5),
        ([256], [32768], {}, 129.5),
        ([600], [32768], {}, 305.5),  # 152, of which 132 stay whole: 292.8
        ([1200], [32768], {}, 592.5),  # 580.3
        ([100] * 4, [30000, 9000, 8000, 2000], {}, 121.0),  # 93.2
        ([32], [131072], {"kv_heads": 1, "group": 8}, 26.5),
        ([512], [32768], {}, 257.5),  # for each SM one, and none is cut
    ],
)
def test_sms_are_busy(
    query_lens: list[int], seq_lens: list[int], changes: dict[str, int], at_most: float, device: torch.device
) -> None:
    of = listing(**changes)
    assert makespan(listed(of, query_lens, seq_lens, device), of.heads) <= at_most


def test_what_waits_for_memory_is_not_cut(device: torch.device) -> None:
    """96 blocks that share no keys read as fast as the memory can."""
    entries = listed(listing(max_query_len=16), [16] * 12, [4096 + 300 * nth for nth in range(12)], device)
    assert {entry.parts for entry in entries} == {1}


@pytest.mark.parametrize("query_lens", [[0], [0, 0, 0]])
def test_nothing_to_do(query_lens: list[int], device: torch.device) -> None:
    assert listed(listing(), query_lens, [5] * len(query_lens), device) == []
