"""The scheduler by itself: budget, order, preemption, rollback, windows, accounts."""

from __future__ import annotations

import pytest
from fake_runner import next_token
from invariants import check_scheduler
from scheduler_bench import Bench, prompt, update

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, KVGroup, Request, RequestStatus, SampledToken, SchedulerOutput
from pagedattn.errors import PagedAttnError


def test_budget_and_request_limits_hold_in_every_step() -> None:
    """Never more tokens than the budget, more requests than the limit, or one request twice."""
    bench = Bench(200, budget=20, seqs=6, share=0.5)
    for index in range(24):
        bench.add(prompt(5 + 3 * index, index), 6)
    steps = bench.finish()
    full = 0
    for step in steps:
        names = [item.request.request_id for item in step.scheduled]
        assert step.num_tokens <= 20 and len(names) == len(set(names)) <= 6
        assert max(item.num_tokens for item in step.scheduled) <= 10
        full += step.num_tokens == 20
    assert full > 10


def test_share_of_one_prefill_leaves_room_for_another() -> None:
    bench = Bench(200, budget=16, share=0.5)
    bench.add(prompt(40), 2)
    bench.add(prompt(40, 1), 2)
    step = bench.step()
    assert step is not None and [item.num_tokens for item in step.scheduled] == [8, 8]
    bench.finish()


def test_decodes_come_first_in_the_step() -> None:
    bench = Bench(200, budget=12, share=0.5)
    long, short = bench.add(prompt(60), 4), bench.add(prompt(4, 3), 9)
    bench.step()
    step = bench.step()
    assert step is not None and step.num_decodes == 1
    assert [item.request for item in step.scheduled] == [short, long]
    bench.finish()


def test_requests_are_served_in_order_of_arrival() -> None:
    """Of equal requests, an earlier one never ends after a later one."""
    bench = Bench(30, budget=16, seqs=4)
    for index in range(12):
        bench.add(prompt(10, index), 6)
    order: list[str] = []
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
        order += [r.request_id for r in bench.requests if r.finished and r.request_id not in order]
    assert order == [request.request_id for request in bench.requests]


def test_outgrowing_request_does_not_end_its_neighbours() -> None:
    bench = Bench(8, budget=64)
    big = bench.add(prompt(9), 100)
    small = [bench.add(prompt(5, index), 12) for index in (1, 2)]
    bench.finish()
    assert big.explanation is not None and all(r.num_generated == 12 and r.explanation is None for r in small)
    assert bench.scheduler.stats.preemptions > 0


def test_newest_is_preempted_and_waits_first() -> None:
    """Victims are the newest; the oldest never gives way, and a victim is the next to run again."""
    bench = Bench(13, seqs=4, budget=64)
    requests = [bench.add(prompt(8, index), 16) for index in range(3)]
    late = bench.add(prompt(8, 9), 4)
    bench.finish()
    assert requests[0].num_preemptions == 0 and requests[2].num_preemptions > 0
    assert late.num_generated == 4
    counts = [request.num_preemptions for request in requests]
    assert counts == sorted(counts) and max(counts) < 10


def test_newest_waits_for_a_block_instead_of_giving_up_its_own() -> None:
    """The request that grows is never its own victim: with older ones running it keeps its blocks and waits."""
    bench = Bench(8, seqs=2, budget=64)
    bench.scheduler._headroom = lambda plan: 0  # type: ignore[method-assign]
    old, new = bench.add(prompt(12), 4), bench.add(prompt(11, 1), 8)
    stalled = 0
    while not old.finished:
        step = bench.step()
        assert step is not None
        stalled += all(item.request is not new for item in step.scheduled)
        assert len(new.block_ids[0]) == 3
    assert stalled == 2
    bench.finish()
    assert new.num_preemptions == 0


def test_watermark_keeps_admissions_from_causing_preemptions() -> None:
    """Admitting to the last block costs preemptions that leaving a block per running request avoids."""

    def preemptions(headroom: bool) -> int:
        bench = Bench(40, seqs=16, budget=64)
        if not headroom:
            bench.scheduler._headroom = lambda plan: 0  # type: ignore[method-assign]
        for index in range(24):
            bench.add(prompt(10, index), 4 + index % 5)
        bench.finish()
        return bench.scheduler.stats.preemptions

    without = preemptions(False)
    assert without > 0 and preemptions(True) < without


def test_a_large_cache_keeps_a_hundredth_free_for_those_that_run() -> None:
    """A request that would fill the cache to its last blocks waits, rather than enter and be preempted soon after."""
    bench = Bench(1001, seqs=2, budget=4096)
    bench.add(prompt(40), 30)
    bench.step()
    large = bench.add(prompt(4 * 985, 1), 30)
    bench.step()
    assert bench.scheduler.running == bench.requests[:1] and bench.kv.pool.num_free == 1000 - 11
    bench.finish()
    assert large.num_generated == 30 and bench.scheduler.stats.preemptions == 0


def test_every_token_is_accounted_for() -> None:
    """Scheduled + cached = computed by the end + recomputed."""
    bench = Bench(16, seqs=6, budget=24)
    for index in range(12):
        bench.add(prompt(6 + index % 3), 10)
    bench.finish()
    stats = bench.scheduler.stats
    needed = sum(len(request.token_ids) - 1 for request in bench.requests)
    assert stats.preemptions > 0 and stats.cached_tokens > 0
    assert stats.scheduled_tokens + stats.cached_tokens == needed + stats.recomputed_tokens
    assert stats.generated_tokens == sum(request.num_generated for request in bench.requests)


def test_two_steps_cannot_be_in_flight() -> None:
    bench = Bench()
    bench.add(prompt(5))
    step = bench.scheduler.schedule()
    assert step is not None
    with pytest.raises(PagedAttnError, match="came before"):
        bench.scheduler.schedule()
    with pytest.raises(PagedAttnError, match="another step"):
        update(bench.scheduler, SchedulerOutput((), 0, ()), [])
    bench.scheduler.rollback(step)
    with pytest.raises(PagedAttnError, match="another step"):
        bench.scheduler.rollback(step)
    bench.finish()


def progress(request: Request) -> tuple[object, ...]:
    tables = [table[:] for table in request.block_ids]
    return request.status, request.num_computed_tokens, tables, request.num_cached_blocks[:]


@pytest.mark.parametrize("caching", [True, False])
def test_rollback_restores_what_was_before_the_step(caching: bool) -> None:
    """A failed step leaves progress, tables, keys and queues as they were, and its blocks unknown to the cache."""
    bench = Bench(24, caching=caching, budget=20)
    for index in range(3):
        bench.add(prompt(7, index), 12)
    rolled_back = 0
    while any(not request.finished for request in bench.requests):
        before = [progress(request) for request in bench.requests]
        queues = [r.request_id for r in bench.scheduler.running], list(bench.scheduler.waiting)
        step = bench.scheduler.schedule()
        assert step is not None and bench.scheduler.stats.preemptions == 0
        bench.runner.execute(step)
        bench.scheduler.rollback(step)
        check_scheduler(bench.scheduler)
        after = [
            (r.status, r.num_computed_tokens, [t[:] for t in r.block_ids], r.num_cached_blocks[:])
            for r in bench.requests
        ]
        assert after == before
        assert queues == ([r.request_id for r in bench.scheduler.running], list(bench.scheduler.waiting))
        rolled_back += 1
        bench.step()
    assert rolled_back > 12 and bench.scheduler.stats.rollbacks == rolled_back
    bench.finish()


def test_failed_request_leaves_nothing_in_the_cache() -> None:
    """What a request with NaN logits computed, in this step or in earlier chunks, is not hit; what it hit is."""
    bench = Bench(budget=8)
    bench.add(prompt(9), 2)
    bench.finish()
    bad = bench.add([*prompt(8), *prompt(20, 50)], 4)
    while not bad.finished:
        step = bench.scheduler.schedule()
        assert step is not None
        results = [token and SampledToken(-1, error="NaN") for token in bench.runner.execute(step)]
        update(bench.scheduler, step, results)
        check_scheduler(bench.scheduler)
    assert bad.status is RequestStatus.FINISHED_ERROR and bad.num_prompt_hits == 8
    again = bench.add([*prompt(8), *prompt(20, 50)], 4)
    bench.finish()
    assert again.num_prompt_hits == 8


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13])
def test_window_blocks_are_released_while_running(window: int) -> None:
    """A window group holds no more blocks than its window and one chunk need, however long the sequence."""
    bench = Bench(64, [KVGroup(4), KVGroup(4, window)], budget=8)
    request = bench.add(prompt(30), 30)
    most = released = 0
    while not request.finished:
        bench.step()
        released = max([released, *request.num_released])
        most = max([most, *(sum(block > 0 for block in table) for table in request.block_ids[1:])])
    assert most <= -(-(window - 1 + 8) // 4) + 1 and released >= (58 - window) // 4
    bench.finish()


def test_a_prompt_leaves_a_token_of_the_budget_to_everyone_behind_it() -> None:
    bench = Bench(200, budget=8)
    bench.scheduler.max_chunk = 2
    long, short = bench.add(prompt(60), 4), [bench.add(prompt(1, index), 20) for index in range(5)]
    bench.step()
    bench.scheduler.max_chunk = 8
    step = bench.step()
    assert step is not None and step.num_tokens == 8 and step.num_decodes == 5
    assert long.num_computed_tokens == 2 + 3 and all(request.num_generated == 2 for request in short)
    bench.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_ends_while_its_step_runs_stays_ended(fails: bool) -> None:
    bench = Bench()
    gone, stays = bench.add(prompt(9), 4), bench.add(prompt(9, 3), 4)
    step = bench.scheduler.schedule()
    assert step is not None
    results = bench.runner.execute(step)
    assert bench.scheduler.finish(gone, RequestStatus.FINISHED_ABORT)
    assert not bench.scheduler.finish(gone, RequestStatus.FINISHED_ABORT)
    if fails:
        bench.scheduler.rollback(step)
    else:
        assert [request for request, _ in update(bench.scheduler, step, results)] == [stays]
    check_scheduler(bench.scheduler)
    assert gone.status is RequestStatus.FINISHED_ABORT and gone.num_generated == 0 and not gone.block_ids
    bench.finish()
    assert stays.num_generated == 4


def test_prompts_admitted_together_must_fit_together() -> None:
    """Each of two prompts has room for itself; the second waits, as the first has not taken all of its blocks yet."""
    bench = Bench(28, budget=16, share=0.5)
    first, second = bench.add(prompt(60), 4), bench.add(prompt(60, 1), 4)
    bench.step()
    assert bench.scheduler.running == [first] and not second.block_ids
    bench.finish()
    assert bench.scheduler.stats.preemptions == 0


def test_a_waiting_request_notices_that_its_beginning_was_cached_meanwhile() -> None:
    bench = Bench(21, budget=8)
    first, second = bench.add(prompt(40), 30), bench.add(prompt(43), 2)
    while not second.finished:
        bench.step()
        assert not first.finished
    assert second.num_prompt_hits == 40
    bench.finish()


def test_hits_of_the_prompt_are_those_of_the_first_admission() -> None:
    bench = Bench()
    request = bench.add(prompt(9), 6)
    bench.step()
    bench.step()
    bench.scheduler.running.remove(request)
    bench.scheduler._requeue(request, RequestStatus.PREEMPTED)
    bench.step()
    assert request.num_cached_tokens == 8 and request.num_prompt_hits == 0
    bench.finish()


def test_restart_keeps_tokens_and_ends_what_had_ended() -> None:
    """After an interrupt in the middle of an update: who has all tokens is done, all others begin again."""
    bench = Bench()
    full, half, new = (bench.add(prompt(5, index), 4) for index in range(3))
    bench.step()
    full.token_ids.extend([1, 2, 3])
    half.token_ids.append(next_token(half.token_ids))
    bench.kv = KVCacheManager(BlockPool(64), [KVGroup(4)])
    bench.scheduler.restart(bench.kv, [new, half, full])
    bench.runner.ref_count = bench.kv.pool.ref_count
    check_scheduler(bench.scheduler)
    assert full.status is RequestStatus.FINISHED_LENGTH
    assert list(bench.scheduler.waiting) == [half.request_id, new.request_id]
    bench.requests.remove(full)
    bench.finish()
    assert half.num_generated == new.num_generated == 4


def test_a_prompt_enters_with_the_open_blocks_that_are_free() -> None:
    """One runs with a block, so that of five four are left: a prompt begins with sixteen tokens."""
    bench = Bench(64, [KVGroup(4), KVGroup(4, recent_blocks=6)])
    assert bench.scheduler.max_num_seqs == 5, "each has a block"
    bench.add(prompt(3), 20)
    bench.step()
    bench.add(prompt(30, 5), 2)
    bench.add(prompt(9, 7), 2)
    sizes = []
    for _ in range(3):
        step = bench.step()
        assert step is not None
        sizes.append([item.num_tokens for item in step.scheduled])
    assert sizes == [[1, 16], [1, 14], [1, 1, 9]]
    bench.finish()


def test_a_prompt_takes_blocks_from_a_newer_request_where_neither_cache_has_any() -> None:
    """The second cache is as large as the first, so that it bounds nothing; the prompt would wait for ever."""
    groups = [KVGroup(4, window_blocks=4), KVGroup(4, recent_blocks=9, window_blocks=4)]
    bench = Bench(9, groups, seqs=2, budget=16, share=0.25)
    bench.scheduler._room = lambda *_: 0  # type: ignore[method-assign]
    bench.add(prompt(28), 2)
    bench.add(prompt(15, 5), 8)
    bench.finish()
    assert bench.requests[1].num_preemptions > 0 == bench.requests[0].num_preemptions
