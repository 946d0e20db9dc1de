"""What the engine says of itself: queues, cache, preemptions, times of steps, and a line about them now and then."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from fake_runner import FakeRunner, fake_llm, greedy
from invariants import run_out

from pagedattn.engine import SchedulerOutput
from pagedattn.engine.api import stats as stats_module
from pagedattn.engine.api.stats import StepTimes
from pagedattn.engine.config import EngineConfig
from pagedattn.errors import InvalidInputError


class Clock:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def slow_runner(clock: Clock, seconds: float, **options: Any) -> FakeRunner:
    """A runner whose steps take `seconds` on the clock."""
    runner = FakeRunner(**options)

    def take_time(step: SchedulerOutput) -> None:
        clock.now += seconds

    runner.before = take_time
    return runner


def test_step_times_are_those_of_recent_steps(clock: Clock) -> None:
    runner = slow_runner(clock, 0.25)
    llm = fake_llm(runner)
    assert llm.stats().step_times == StepTimes(0, 0.0, 0.0, 0.0)
    llm.generate([1, 2, 3], greedy(5), progress=False)
    assert llm.stats().step_times == StepTimes(5, 0.25, 0.25, 0.25)
    runner.before = lambda step: None
    llm.generate([[1, 2, 3]] * 9, greedy(100), progress=False)
    llm.generate([[1, 2, 3]] * 9, greedy(250), progress=False)
    assert llm.stats().step_times == StepTimes(stats_module._RECENT, 0.0, 0.0, 0.0)


def test_summaries_of_times() -> None:
    times = StepTimes.of([float(n) for n in range(100, 0, -1)])
    assert (times.count, times.mean, times.median, times.p99) == (100, 50.5, 51.0, 100.0)
    assert StepTimes.of([3.0]) == StepTimes(1, 3.0, 3.0, 3.0)


def test_queues_and_blocks_while_requests_are_swapped() -> None:
    llm = fake_llm(FakeRunner(14, swap_blocks=40), max_num_batched_tokens=64)
    for index in range(4):
        llm.add_request([index] * 8, greedy(24))
    seen = 0
    while llm.has_unfinished:
        llm.step()
        stats = llm.stats()
        if stats.num_swapped:
            assert stats.num_swapped <= stats.num_waiting and stats.num_running + stats.num_waiting <= 4
            assert stats.num_free_swap_blocks < stats.num_swap_blocks == 40
            assert (stats.cache_use > 0) == (stats.num_running > 0) and stats.num_blocks == 13
            seen += 1
    stats = llm.stats()
    assert seen > 3 and stats.counters.swaps == stats.counters.preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.cache_use) == (0, 0, 0, 0.0)
    assert stats.num_free_swap_blocks == 40


def test_a_line_per_interval(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of a second, a line every five; rates are those since the line before."""
    llm = fake_llm(slow_runner(clock, 1.0), log_interval=5)
    for _ in range(2):
        llm.add_request([1, 2, 3, 4, 5], greedy(22))
    with caplog.at_level(logging.INFO, "pagedattn.engine"):
        run_out(llm)
    lines = [record.getMessage() for record in caplog.records if "running" in record.getMessage()]
    assert len(lines) == 23 // 5
    assert lines[1] == (
        "2 running, 0 waiting (0 swapped); KV cache 11% in use, 40% of tokens hit; 0 preemptions (0 by swap); "
        "2 tokens/s generated, 2 computed; step 1000.0 ms (99%: 1000.0)"
    )


@pytest.mark.parametrize(("interval", "level"), [(None, logging.INFO), (5, logging.WARNING)])
def test_no_line_where_none_is_wanted(
    interval: float | None, level: int, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    llm = fake_llm(slow_runner(clock, 1.0), log_interval=interval)
    with caplog.at_level(level, "pagedattn.engine"):
        llm.generate([1, 2, 3], greedy(20), progress=False)
    assert not caplog.records


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), True, "1"])
def test_bad_intervals_are_refused(interval: Any) -> None:
    with pytest.raises(InvalidInputError, match="log_interval"):
        EngineConfig(model="m", log_interval=interval)
