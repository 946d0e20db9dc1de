"""What the device holds of requests, after any history of growth, trims, preemptions and lost rows."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch

from pagedattn.engine import KVGroup, Request, ScheduledRequest
from pagedattn.engine.sampling.packed_params import PARAMS, next_state
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.worker.persistent_batch import PersistentBatch
from pagedattn.errors import InvalidInputError

GROUPS = [KVGroup(4), KVGroup(8, 10)]


def request(seed: int = 0, **sampling: float) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    out = Request("r", array("i", [1] * 200), params, arrival=0, max_total_tokens=999, seed=seed)
    out.block_ids = [[], []]
    return out


def grow(one: Request, end: int, draw: random.Random) -> None:
    for table, group in zip(one.block_ids, GROUPS, strict=True):
        while len(table) * group.block_size < end:
            table.append(draw.randrange(1, 1000))


def put(state: PersistentBatch, items: list[ScheduledRequest]) -> tuple[np.ndarray, int]:
    starts = np.array([item.start for item in items], dtype=np.int32)
    ends = starts + np.array([item.num_tokens for item in items], dtype=np.int32)
    rows, updates = state.place([item.request for item in items], starts, ends)
    state.apply(*map(torch.from_numpy, updates.parts))
    return rows, len(updates.entries)


def check(state: PersistentBatch, items: list[ScheduledRequest], rows: np.ndarray) -> None:
    assert len(set(rows.tolist())) == len(items) and rows.max() < state.num_rows
    for found, table in zip(state.tables.numpy(), state.block_tables, strict=True):
        assert np.array_equal(found[table.host >= 0], table.host[table.host >= 0])
    for item, row in zip(items, rows.tolist(), strict=True):
        for group, kind in enumerate(GROUPS):
            used = -(-(item.start + item.num_tokens) // kind.block_size)
            live = 0 if kind.sliding_window is None else max(0, item.start - kind.sliding_window + 1) // kind.block_size
            assert state.tables[group, row, live:used].tolist() == item.request.block_ids[group][live:used]


@pytest.mark.parametrize("seed", range(5))
def test_tables_are_those_of_the_requests_whatever_happened(seed: int) -> None:
    draw, state = random.Random(seed), PersistentBatch(GROUPS, 6, 200, torch.device("cpu"))
    requests, sent, lost = [request(index) for index in range(10)], 0, 0
    for _ in range(400):
        chosen = draw.sample(requests, draw.randrange(1, 6))
        items = []
        for one in chosen:
            start = one.num_computed_tokens
            size = draw.choice([1, 1, 1, 1, draw.randrange(1, 20)])
            if start + size > 190 or draw.random() < 0.03:  # preempted: it starts again with other blocks
                one.clear_cache_state()
                one.block_ids, start = [[], []], 0
            if draw.random() < 0.1:  # trimmed after a failed step
                for table, group in zip(one.block_ids, GROUPS, strict=True):
                    del table[-(-start // group.block_size) :]
            grow(one, start + size, draw)
            released = max(0, start - 9) // 8
            one.block_ids[1][:released] = [0] * released
            items.append(ScheduledRequest(one, start, size, True))
        known = set(state._row_of)
        rows, entries = put(state, items)
        lost += len(known - set(state._row_of))
        sent += entries
        check(state, items, rows)
        if draw.random() < 0.02:
            state.forget()
        elif draw.random() > 0.1:  # else the step is rolled back
            for item in items:
                item.request.num_computed_tokens = item.start + item.num_tokens
    assert lost > 10 and sent < 400 * 5 * 60 / 4


def test_a_decode_sends_a_block_only_when_it_opens_one() -> None:
    state, draw = PersistentBatch(GROUPS, 4, 200, torch.device("cpu")), random.Random(1)
    one, counts = request(), []
    for start in range(40):
        grow(one, start + 1, draw)
        counts.append(put(state, [ScheduledRequest(one, start, 1, True)])[1])
    assert counts[0] == 2, "a new request's table comes whole"
    assert counts[1:] == [(start % 4 == 0) + (start % 8 == 0) for start in range(1, 40)]


def test_a_lost_step_is_sent_again() -> None:
    state, draw = PersistentBatch(GROUPS, 4, 200, torch.device("cpu")), random.Random(1)
    one = request()
    grow(one, 9, draw)
    first, ends = np.zeros(1, dtype=np.int32), np.full(1, 9, dtype=np.int32)
    state.place([one], first, ends)  # and never applied
    state.forget()
    item = ScheduledRequest(one, 0, 9, True)
    rows, entries = put(state, [item])
    assert entries == 3 + 2
    check(state, [item], rows)


def test_parameters_are_sent_once() -> None:
    state, draw = PersistentBatch(GROUPS, 3, 200, torch.device("cpu")), random.Random(1)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75}
    one = request(-5, temperature=0.25, top_p=0.5, min_p=0.125, top_k=7, **penalties)
    other, plain = request(3, temperature=0, min_tokens=2), request(3)
    for each in (one, other, plain):
        grow(each, 2, draw)
    rows, _ = put(state, [ScheduledRequest(each, 0, 1, True) for each in (one, other, plain)])
    found = state.params[rows[0].item()]
    assert found[:3].view(torch.float32).tolist() == [0.25, 0.5, 0.125] and found[3].item() == 7
    assert found[6:9].view(torch.float32).tolist() == [1.5, -0.5, 0.75] and found[9].item() == one.prompt_len > 0
    assert found[4:6].view(torch.int64).item() == int(next_state(np.array([-5 % 2**64], np.uint64)).view(np.int64)[0])
    assert state.params[rows[1].item(), 0].item() == 0 and state.params.shape[1] == PARAMS
    assert state.needs_processing[rows].tolist() == [True, True, False]
    _, updates = state.place([one], np.array([1], dtype=np.int32), np.array([2], dtype=np.int32))
    assert len(updates.rows) == 0


def test_more_requests_than_rows_are_refused() -> None:
    state, draw = PersistentBatch(GROUPS, 2, 200, torch.device("cpu")), random.Random(1)
    items = [ScheduledRequest(request(), 0, 1, True) for _ in range(3)]
    for item in items:
        grow(item.request, 1, draw)
    with pytest.raises(InvalidInputError, match="at most 2"):
        put(state, items)
