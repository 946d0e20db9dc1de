"""Packed steps arrive at a rank as they were, and keep its tables, whatever the scheduler did since the one before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scheduler_bench import update

from pagedattn import BlockPool
from pagedattn.engine import (
    KVCacheManager,
    KVGroup,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from pagedattn.engine.parallel.step_wire import decode_step, decode_tokens, encode_step, encode_tokens, pack, unpack
from pagedattn.engine.sampling.packed_params import request_params
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.scheduler.scheduler import Scheduler
from pagedattn.engine.worker.host_batch import HostBatch, HostBatchBuilder
from pagedattn.engine.worker.persistent_batch import PersistentBatch

GROUPS = [KVGroup(4), KVGroup(4, 9)]
OPEN = [KVGroup(4), KVGroup(4, recent_blocks=13)]
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, stop=("a", "b"), stop_token_ids=[7], logprobs=2),
    SamplingParams(repetition_penalty=1.5, min_tokens=9, stop_token_ids=[3, 4]),
]


def request(name: str, tokens: list[int], sampling: SamplingParams = KINDS[0]) -> Request:
    stops = frozenset(sampling.stop_token_ids or ())
    return Request(name, array("i", tokens), sampling, arrival=int(name), max_total_tokens=60, stop_ids=stops)


def driver(groups: list[KVGroup] = GROUPS) -> HostBatchBuilder:
    """As `ParallelRunner` has it."""
    return HostBatchBuilder(groups, PersistentBatch(groups, 6, 64, torch.device("meta")))


def leaves(value: object) -> Iterator[object]:
    """The arrays and numbers of a batch, in order."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def sent(batch: HostBatch) -> HostBatch:
    """What a rank gets, which is the same."""
    got = decode_step(encode_step(batch))
    assert type(got) is type(batch) and len([*leaves(got)]) == len([*leaves(batch)])
    for one, other in zip(leaves(got), leaves(batch), strict=True):
        if isinstance(other, np.ndarray):
            assert isinstance(one, np.ndarray) and one.dtype == np.int32 and one.shape == other.shape
            assert np.array_equal(one, other)
        else:
            assert one == other and type(one) is type(other)
    return got


@pytest.mark.parametrize(("seed", "groups"), [*((seed, GROUPS) for seed in range(4)), (0, OPEN), (2, OPEN)])
def test_steps_of_a_busy_scheduler(seed: int, groups: list[KVGroup]) -> None:
    """Arrivals, aborts, preemptions, released blocks, forks, failed steps and lost ones, for 400 steps."""
    draw = random.Random(seed)
    kv = KVCacheManager(BlockPool(28 if groups is GROUPS else 16), groups)
    scheduler = Scheduler(kv, max_num_seqs=6, max_num_batched_tokens=16, max_prefill_share=0.5)
    builder, rank = driver(groups), PersistentBatch(groups, 6, 64, torch.device("cpu"))
    live: list[Request] = []
    lost = arrived = released = processed = counted = 0
    for turn in range(400):
        if len(live) < 8:
            tokens = [draw.randrange(50) for _ in range(draw.randrange(1, 30))]
            twins = [request(str(2 * turn), tokens, draw.choice(KINDS))]
            if draw.random() < 0.6:
                twins.append(request(str(2 * turn + 1), tokens, draw.choice(KINDS)))
                twins[1].fork_of = twins[0]
            for one in twins:
                scheduler.add(one)
            live += twins
        if draw.random() < 0.05:
            scheduler.finish(draw.choice(live), RequestStatus.FINISHED_ABORT)
        step = scheduler.schedule()
        if step is None:
            update(scheduler, None, [])
            continue
        batch = builder.pack(step)
        if draw.random() < 0.05:
            builder.forget()
            lost += 1
        else:
            got = sent(batch)
            rank.apply(*map(torch.from_numpy, got.updates.parts))
            check_rank(rank, got, step, groups)
            arrived += 1
            released += any(item.request.num_released[1] for item in step.scheduled)
            processed += got.sampling is not None
            counted += got.sampling is not None and len(got.sampling.counts.prompt_tokens) > 0
        if draw.random() < 0.05:
            scheduler.rollback(step)
        else:
            update(scheduler, step, [SampledToken(draw.randrange(50)) if i.samples else None for i in step.scheduled])
        live = [one for one in live if not one.finished]
    assert lost > 5 and arrived > 300 and released > 50 and processed > 100 and counted > 10
    assert scheduler.stats.preemptions > 4 and scheduler.stats.rollbacks > 5


def check_rank(rank: PersistentBatch, batch: HostBatch, step: SchedulerOutput, groups: list[KVGroup]) -> None:
    """The rank's rows have the requests' blocks and parameters, and the batch their tokens."""
    tokens = [item.request.token_ids[item.start : item.start + item.num_tokens] for item in step.scheduled]
    assert batch.tokens.tolist() == [token for some in tokens for token in some]
    params = request_params([item.request for item in step.scheduled])
    for item, row, own in zip(step.scheduled, batch.rows.tolist(), params, strict=True):
        assert rank.params[row].tolist() == own.tolist()
        for group, kind in enumerate(groups):
            used = -(-(item.start + item.num_tokens) // kind.block_size)
            first = item.request.num_released[group]
            assert rank.tables[group, row, first:used].tolist() == item.request.block_ids[group][first:used]
    pairs = (batch.moves.swap_out, batch.moves.swap_in, batch.moves.copies)
    assert [[*map(tuple, one.tolist())] for one in pairs] == [[*step.swap_out], [*step.swap_in], [*step.copies]]
    assert batch.moves.fresh.tolist() == [*step.fresh_blocks]
    assert batch.moves.recent_fresh.tolist() == [*step.recent_fresh]
    assert [*map(tuple, batch.moves.recent_copies.tolist())] == [*step.recent_copies]


def test_a_decode_sends_little() -> None:
    builder, long = driver([KVGroup(16)]), request("1", list(range(60)))
    long.block_ids = [[1, 2, 3, 4]]
    builder.pack(SchedulerOutput((ScheduledRequest(long, 0, 60, True),), 0, ()))
    long.token_ids.append(9)
    assert len(encode_step(builder.pack(SchedulerOutput((ScheduledRequest(long, 60, 1, True),), 1, ())))) < 300


def test_copies_and_a_step_of_nothing_else() -> None:
    step = SchedulerOutput((), 0, ((1, 2), (7, 3)), ((4, 0),), ((1, 9), (2, 8)), (5, 9, 8), ((2, 3),), (6, 7))
    got = sent(driver(OPEN).pack(step))
    moved = [[[4, 0]], [5, 9, 8], [[1, 9], [2, 8]], [[1, 2], [7, 3]], [6, 7], [[2, 3]]]
    assert [one.tolist() for one in got.moves] == moved
    assert [one.tolist() for one in sent(driver().pack(step)).moves] == [*moved[:4], [], []]
    assert len(got.rows) == len(got.tokens) == 0 and got.sampling is None


def test_a_token_that_nobody_has_read_is_left_to_the_rank() -> None:
    builder, one = driver([KVGroup(4)]), request("1", [4, 5, -1])
    one.block_ids = [[1]]
    assert sent(builder.pack(SchedulerOutput((ScheduledRequest(one, 2, 1, True),), 1, ()))).tokens.tolist() == [-1]


def test_tokens() -> None:
    one = request("1", [4, 5])
    items = [ScheduledRequest(one, 0, 2, samples) for samples in (True, False, True, True, True)]
    sampled = [
        SampledToken(5),
        SampledToken(-1, error="no token has a finite logit"),
        SampledToken(6, -0.1, {6: -0.1, 9: -3.25}),
        SampledToken(7, -1e-17, {}),
    ]
    wanted = [sampled[0], None, *sampled[1:]]
    assert decode_tokens(encode_tokens(sampled), SchedulerOutput(tuple(items), 0, ())) == wanted


def test_messages() -> None:
    shapes = [(), (0,), (3,), (0, 2), (2, 0), (4, 5)]
    arrays = [(np.arange(np.prod(shape)) - 2**31).astype(np.int32).reshape(shape) for shape in shapes]
    for json_part in (None, {"a": [1, "é"]}, "", "four"):
        for some in ([], arrays):
            found, got = unpack(pack(json_part, some))
            assert found == json_part and [one.shape for one in got] == [one.shape for one in some]
            assert all(map(np.array_equal, got, some))
