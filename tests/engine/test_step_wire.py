"""Steps arrive at a rank as they were, whatever the scheduler did since the one before, and without what it has."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields, replace

import pytest
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
from pagedattn.engine.parallel.step_wire import StepDecoder, StepEncoder, decode_tokens, encode_tokens, pack, unpack
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.scheduler.scheduler import Scheduler
from pagedattn.errors import PagedAttnError

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, seed=3, stop=("a", "b"), stop_token_ids=[7], logprobs=2)


def request(name: str, tokens: list[int], seed: int = 2**62 + 1) -> Request:
    return Request(name, array("i", tokens), SAMPLING, arrival=int(name), max_total_tokens=60, seed=seed)


def check(got: SchedulerOutput, want: SchedulerOutput) -> None:
    """A decoded step says what the driver's says."""
    assert replace(got, scheduled=()) == replace(want, scheduled=())
    assert len(got.scheduled) == len(want.scheduled)
    for one, other in zip(got.scheduled, want.scheduled, strict=True):
        assert (one.start, one.num_tokens, one.samples) == (other.start, other.num_tokens, other.samples)
        for name in ("request_id", "token_ids", "prompt_len", "block_ids", "seed", "sampling", "stop_ids"):
            assert getattr(one.request, name) == getattr(other.request, name), name


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_a_busy_scheduler(seed: int) -> None:
    """Arrivals, aborts, preemptions, released windows, forks, failed steps and lost ones, for 400 steps."""
    draw = random.Random(seed)
    kv = KVCacheManager(BlockPool(28), [KVGroup(4), KVGroup(4, 9)])
    scheduler = Scheduler(kv, max_num_seqs=6, max_num_batched_tokens=16, max_prefill_share=0.5)
    encoder, decoder = StepEncoder(), StepDecoder()
    live: list[Request] = []
    lost = arrived = released = 0
    for turn in range(400):
        if len(live) < 8:
            new = request(str(2 * turn), [draw.randrange(50) for _ in range(draw.randrange(1, 30))])
            twins = [new]
            if draw.random() < 0.6:
                twins.append(request(str(2 * turn + 1), list(new.token_ids)))
                twins[1].fork_of = new
            for one in twins:
                scheduler.add(one)
            live += twins
        if draw.random() < 0.05:
            scheduler.finish(draw.choice(live), RequestStatus.FINISHED_ABORT)
        step = scheduler.schedule()
        if step is None:
            update(scheduler, None, [])
            continue
        data = encoder.encode(step)
        if draw.random() < 0.05:
            encoder.forget()
            lost += 1
        else:
            check(decoder.decode(data), step)
            arrived += 1
            released += any(item.request.num_released[1] for item in step.scheduled)
        if draw.random() < 0.05:
            scheduler.rollback(step)
        else:
            update(scheduler, step, [SampledToken(draw.randrange(50)) if i.samples else None for i in step.scheduled])
        live = [one for one in live if not one.finished]
    assert lost > 5 and arrived > 300 and released > 50
    assert scheduler.stats.preemptions > 4 and scheduler.stats.rollbacks > 5


def test_a_decode_sends_little_and_keeps_the_objects() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    long = request("1", list(range(5000)))
    long.block_ids = [list(range(1, 314))]
    first = decoder.decode(encoder.encode(SchedulerOutput((ScheduledRequest(long, 0, 5000, True),), 0, ())))
    tables = first.scheduled[0].request.block_ids
    long.token_ids.append(9)
    long.block_ids[0].append(400)
    step = SchedulerOutput((ScheduledRequest(long, 5000, 1, True),), 1, ())
    data = encoder.encode(step)
    assert len(data) < 100
    second = decoder.decode(data)
    check(second, step)
    assert second.scheduled[0].request is first.scheduled[0].request
    assert second.scheduled[0].request.block_ids is tables  # longer, not new
    long.block_ids = [list(range(500, 814))]  # preempted and computed again
    check(third := decoder.decode(encoder.encode(step)), step)
    assert third.scheduled[0].request.block_ids is not tables


def test_every_field_of_a_step_travels() -> None:
    names = {field.name for field in fields(SchedulerOutput)}
    assert names == {"scheduled", "num_decodes", "copies", "swap_out", "swap_in", "fresh_blocks"}
    assert ScheduledRequest._fields == ("request", "start", "num_tokens", "samples")


def test_copies_and_a_step_of_nothing_else() -> None:
    step = SchedulerOutput((), 0, ((1, 2), (7, 3)), ((4, 0),), ((1, 9), (2, 8)), (5, 9, 8))
    check(StepDecoder().decode(StepEncoder().encode(step)), step)


def test_a_token_that_nobody_has_read_is_sent_again() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    one = request("1", [4, 5])
    one.block_ids = [[1]]
    one.token_ids.append(-1)
    check(decoder.decode(encoder.encode(step := SchedulerOutput((ScheduledRequest(one, 2, 1, True),), 1, ()))), step)
    one.token_ids[-1] = 8
    one.token_ids.append(-1)
    check(decoder.decode(encoder.encode(step := SchedulerOutput((ScheduledRequest(one, 3, 1, True),), 1, ()))), step)


def test_a_rank_that_missed_a_step_says_so() -> None:
    encoder = StepEncoder()
    one = request("1", [4, 5])
    one.block_ids = [[1]]
    step = SchedulerOutput((ScheduledRequest(one, 0, 2, True),), 0, ())
    encoder.encode(step)
    with pytest.raises(PagedAttnError, match="does not know"):
        StepDecoder().decode(encoder.encode(step))


def test_tokens() -> None:
    one = request("1", [4, 5])
    items = [ScheduledRequest(one, 0, 2, samples) for samples in (True, False, True, True, True)]
    sampled = [
        SampledToken(5),
        None,
        SampledToken(-1, error="no token has a finite logit"),
        SampledToken(6, -0.1, {6: -0.1, 9: -3.25}),
        SampledToken(7, -1e-17, {}),
    ]
    assert decode_tokens(encode_tokens(sampled), SchedulerOutput(tuple(items), 0, ())) == sampled


def test_messages() -> None:
    for json_part in (None, {"a": [1, "é"]}):
        for arrays in ([], [array("i")], [array("i", [1, -(2**31)]), array("i", range(1000))]):
            assert unpack(pack(json_part, arrays)) == (json_part, arrays)
