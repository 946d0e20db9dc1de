"""Requests that arrive together and begin alike: the later ones wait a step where that saves work, and only there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scheduler_bench import Bench, prompt

from pagedattn.engine import KVGroup, RequestStatus, SchedulerOutput


def names(step: SchedulerOutput | None) -> list[str]:
    assert step is not None
    return [item.request.request_id for item in step.scheduled]


def add_all(bench: Bench, *prompts: Sequence[int]) -> None:
    for tokens in prompts:
        bench.add(tokens, 4)


@pytest.mark.parametrize("groups", [[KVGroup(4)], [KVGroup(4), KVGroup(4, 6)], [KVGroup(4), KVGroup(6)]])
def test_a_prompt_that_many_share_is_computed_once(groups: list[KVGroup]) -> None:
    bench = Bench(300, groups, budget=256, seqs=20)
    add_all(bench, *([*prompt(60), index, index + 1] for index in range(12)))
    assert names(bench.step()) == ["0"]
    assert names(bench.step()) == [str(index) for index in range(12)]
    assert all(request.num_prompt_hits == 60 for request in bench.requests[1:])
    bench.finish()
    assert bench.scheduler.stats.scheduled_tokens == 62 + 11 * 2 + 12 * 3


def test_others_go_ahead_of_those_who_wait() -> None:
    """Twins wait for each other alone, and come back to their place in the order of arrival."""
    bench = Bench(300, budget=256)
    add_all(bench, prompt(20), prompt(20), prompt(20, 5), prompt(20, 5), [1, 2])
    assert names(bench.step()) == ["0", "2", "4"]
    assert list(bench.scheduler.waiting) == ["1", "3"]
    bench.step()
    assert [request.request_id for request in bench.scheduler.running] == ["0", "1", "2", "3", "4"]
    bench.finish()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (prompt(20), prompt(20, 1)),
        (prompt(20), [*prompt(3), 9, *prompt(16)]),
        (prompt(3), prompt(3)),
        (prompt(4), prompt(4)),
        (prompt(20), prompt(4)),
    ],
    ids=["nothing alike", "less than a block", "no whole block", "only a block's last token", "one whole block"],
)
def test_nobody_waits_for_nothing(first: list[int], second: list[int]) -> None:
    bench = Bench(budget=64)
    add_all(bench, first, second)
    assert names(bench.step()) == ["0", "1"]
    bench.finish()


def test_the_same_block_behind_another_beginning_is_not_shared() -> None:
    bench = Bench(budget=64)
    add_all(bench, prompt(9))
    bench.finish()
    add_all(bench, [*prompt(8), *range(50, 59)], [*prompt(8, 1), *range(50, 59)])
    assert names(bench.step()) == ["1", "2"] and bench.requests[1].num_cached_tokens == 8
    bench.finish()


def test_a_partly_shared_prompt_is_worth_a_step_too() -> None:
    bench = Bench(budget=64)
    add_all(bench, prompt(20), [*prompt(9), 0, 0, 0])
    assert names(bench.step()) == ["0"] and names(bench.step()) == ["0", "1"]
    assert bench.requests[1].num_prompt_hits == 8
    bench.finish()


def test_salts_and_requests_that_read_no_cache_do_not_wait() -> None:
    bench = Bench(budget=128)
    bench.add(prompt(20), cache_salt="a")
    bench.add(prompt(20), cache_salt="b")
    bench.add(prompt(20)).skip_prefix_cache_reads = True
    bench.add(prompt(20), cache_salt="a")
    assert names(bench.step()) == ["0", "1", "2"]
    bench.finish()
    assert bench.requests[3].num_prompt_hits == 16
    uncached = Bench(budget=64, caching=False)
    add_all(uncached, prompt(20), prompt(20))
    assert names(uncached.step()) == ["0", "1"]
    uncached.finish()


def test_nobody_waits_for_what_is_cached_already() -> None:
    """The first prompt computes its last block again, whose content is known: its equal can hit that, and need not."""
    bench = Bench(budget=64)
    bench.add(prompt(17), 1)
    bench.finish()
    add_all(bench, prompt(16), prompt(18))
    assert names(bench.step()) == ["1", "2"]
    assert [request.num_prompt_hits for request in bench.requests[1:]] == [12, 16]
    bench.finish()


def test_an_equal_prompt_waits_for_every_chunk_that_it_can_share() -> None:
    bench = Bench(200, budget=16)
    add_all(bench, prompt(64), [*prompt(40), 0])
    steps = [names(bench.step()) for _ in range(4)]
    assert steps == [["0"], ["0"], ["0"], ["0"]]
    bench.finish()
    assert bench.requests[1].num_prompt_hits == 40


def test_equal_prompts_that_wait_keep_their_place_before_a_victim() -> None:
    """A newer request is preempted while an older equal prompt waits: both queues stay in the order of arrival."""
    bench = Bench(budget=64)
    add_all(bench, prompt(20), prompt(20), prompt(20, 5))
    assert names(bench.step()) == ["0", "2"]
    bench.scheduler._requeue(bench.scheduler.running.pop(), RequestStatus.PREEMPTED)
    assert list(bench.scheduler.waiting) == ["1", "2"]
    bench.finish()


def test_a_failed_step_leaves_equal_prompts_in_their_order() -> None:
    bench = Bench(budget=64)
    add_all(bench, prompt(20), prompt(20), prompt(20, 5), prompt(20, 5))
    step = bench.scheduler.schedule()
    assert names(step) == ["0", "2"] and step is not None
    bench.scheduler.rollback(step)
    assert list(bench.scheduler.waiting) == ["0", "1", "2", "3"]
    bench.finish()


def test_who_waits_waits_for_what_will_be_encoded() -> None:
    """Of a format with a window blocks are found once the window has passed them, while those of a window are there."""
    for length, waits in ((11, False), (13, True)):
        bench = Bench(64, [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=16, window_blocks=2)], budget=64)
        add_all(bench, prompt(length), prompt(length))
        assert names(bench.step()) == (["0"] if waits else ["0", "1"])
        assert names(bench.step()) == ["0", "1"]
        assert bench.requests[1].num_prompt_hits == (4 if waits else 0)
        bench.finish()
    recent = bench.kv.recent_pool
    assert recent is not None
    recent.free(recent.allocate(recent.num_usable))  # what stays of the prompt has no window
    add_all(bench, prompt(13), prompt(13))
    assert names(bench.step()) == ["2"]
    bench.finish()
    assert [request.num_prompt_hits for request in bench.requests[2:]] == [0, 8], "whose blocks are there"
