"""The work list of prefill on Hopper: every query block of a step once, sequences of more keys and later rows first,
those of one token in turns with the others."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from pagedattn.kernels.prefill_sm90 import tile_scheduler

LENS = (0, 1, 5, 33, 128, 300)


def listed(query_lens: list[int], seq_lens: list[int], block_q: int, device: torch.device):
    """(token, tokens, position, keys, sequence) of each entry, in order; queries start at row 3."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32) + 3
    slots = sum(query_lens) // block_q + len(query_lens)
    items = torch.full((2 + slots, tile_scheduler.FIELDS), 7, dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    tile_scheduler.launch(starts.to(device), lens, items, block_q)
    assert not items[0, :2].any(), "the counters that hand items out start at zero"
    return [tuple(entry[:5]) for entry in items[2 : 2 + int(items[1, 0])].tolist()]


def expected(query_lens: list[int], seq_lens: list[int], block_q: int) -> list[tuple[int, ...]]:
    entries, start = [], 3
    for seq, (queries, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for done in range(0, queries, block_q):
            entries.append((start + done, min(block_q, queries - done), keys - queries + done, keys, seq))
        start += queries
    entries.sort(key=lambda entry: (-entry[3], entry[4], -entry[0]))
    light = [entry for entry in entries if entry[1] == 1]
    heavy = [entry for entry in entries if entry[1] > 1]
    turns = [entry for pair in zip(heavy, light, strict=False) for entry in pair]
    both = len(turns) // 2
    return turns + heavy[both:] + light[both:]


@pytest.mark.parametrize("seed", range(16))
def test_every_block_once_and_in_order(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    query_lens = [draw.choice(LENS) for _ in range(draw.choice((1, 2, 40, 150)))]
    seq_lens = [n + draw.choice((0, 0, 7, 500)) for n in query_lens]
    block_q = draw.choice((2, 24, 32, 40, 128))
    assert listed(query_lens, seq_lens, block_q, device) == expected(query_lens, seq_lens, block_q)


def test_more_queries_than_keys(device: torch.device) -> None:
    """The first rows of such a sequence come before its first key, and still have an output."""
    assert listed([40], [10], 32, device) == [(35, 8, 2, 10, 0), (3, 32, -30, 10, 0)]


@pytest.mark.parametrize("query_lens", [[0], [0, 0, 0]])
def test_nothing_to_do(query_lens: list[int], device: torch.device) -> None:
    assert listed(query_lens, [5] * len(query_lens), 32, device) == []
