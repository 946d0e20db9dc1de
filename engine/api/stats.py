"""What an engine counts and times, and the line that it logs about it."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace

from ..scheduler.base import BaseScheduler
from ..scheduler.counters import Counters

logger = logging.getLogger("pagedattn.engine")

_RECENT = 512


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds from the beginning of a step to its end, over the last `count` steps that succeeded (512 at most)."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: list[float]) -> StepTimes:
        """What `seconds` of some steps say."""
        if not seconds:
            return cls()
        ordered, count = sorted(seconds), len(seconds)
        return cls(count, sum(ordered) / count, ordered[count // 2], ordered[min(count - 1, count * 99 // 100)])


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at an engine: its queues, its blocks (the null block aside), its counters and its recent steps.

    Swapped requests are among the waiting ones.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_swap_blocks: int
    num_free_swap_blocks: int
    num_prefix_copies: int
    counters: Counters
    step_times: StepTimes

    @property
    def cache_use(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of admitted requests that the prefix cache had, 0 to 1."""
        return self.counters.cached_tokens / max(1, self.counters.queried_tokens)


class Metrics:
    """Times an engine's steps, and logs a line about them now and then (at INFO, as `pagedattn.engine`)."""

    def __init__(self, log_interval: float | None) -> None:
        """Log at most every `log_interval` seconds, never where None."""
        self._interval = log_interval
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._logged_at, self._logged = time.perf_counter(), Counters()

    def look(self, scheduler: BaseScheduler) -> EngineStats:
        """Everything as it is now."""
        pool, swap = scheduler.kv.pool, scheduler.kv.swap
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=swap.num_requests,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_swap_blocks=swap.num_blocks,
            num_free_swap_blocks=swap.num_free,
            num_prefix_copies=len(scheduler.kv.copies),
            counters=replace(scheduler.stats),
            step_times=StepTimes.of(list(self._seconds)),
        )

    def saw_step(self, started: float, scheduler: BaseScheduler) -> None:
        """Note a step that began at `started` (of `time.perf_counter`) and has just ended; log if that is due."""
        now = time.perf_counter()
        self._seconds.append(now - started)
        due = self._interval is not None and now - self._logged_at >= self._interval
        if due and logger.isEnabledFor(logging.INFO):
            stats = self.look(scheduler)
            logger.info("%s", _line(stats, self._logged, now - self._logged_at))
            self._logged_at, self._logged = now, stats.counters


def _line(stats: EngineStats, before: Counters, seconds: float) -> str:
    now, times = stats.counters, stats.step_times
    computed = (now.scheduled_tokens - before.scheduled_tokens) / seconds
    generated = (now.generated_tokens - before.generated_tokens) / seconds
    preemptions, swaps = now.preemptions - before.preemptions, now.swaps - before.swaps
    return (
        f"{stats.num_running} running, {stats.num_waiting} waiting ({stats.num_swapped} swapped); "
        f"KV cache {stats.cache_use:.0%} in use, {stats.hit_rate:.0%} of tokens hit; "
        f"{preemptions} preemptions ({swaps} by swap); {generated:.0f} tokens/s generated, {computed:.0f} computed; "
        f"step {times.median * 1e3:.1f} ms (99%: {times.p99 * 1e3:.1f})"
    )
