"""The two ways to go from step to step: one after another, or each launched before the tokens of the last are read.

Both give the same tokens. Overlapped, the host's work on a step happens while the device is busy with the one before;
what a token of that one ends runs one step too many, whose result is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pagedattn.errors import CapacityError, PagedAttnError

from ..request import Request
from ..runner_protocol import Launched, Launches, Runner
from ..scheduler_output import SampledToken, SchedulerOutput
from .overlap import OverlapScheduler
from .scheduler import Scheduler

Advanced = list[tuple[Request, SampledToken | None]]


class Outcome(NamedTuple):
    """What a turn of a loop did: requests that advanced, whether there was anything to run, and why a step failed.

    A step that failed was taken back.
    """

    advanced: Advanced
    idle: bool
    error: BaseException | None = None


class Loop(Protocol):
    """Where an engine gets its turns from. What `turn` raises leaves the scheduler in the middle of something."""

    def turn(self) -> Outcome: ...

    def abandon(self) -> None:
        """Forget what was launched; the scheduler is about to restart."""


class SerialLoop:
    """Schedule, run, count."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner

    def turn(self) -> Outcome:
        """Run a step and count it."""
        scheduler = self._scheduler
        step = scheduler.schedule()
        if step is None:
            return Outcome(scheduler.update(None, []), idle=True)
        try:
            sampled = _aligned(step, self._runner.execute(step))
        except BaseException as error:
            scheduler.rollback(step)
            return Outcome([], idle=False, error=_explained(error, step))
        return Outcome(scheduler.update(step, sampled), idle=False)

    def abandon(self) -> None:
        """Nothing is ever left launched."""


class OverlapLoop:
    """Schedule and launch a step, then read the one before it."""

    def __init__(self, scheduler: OverlapScheduler, runner: Launches) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._before: tuple[SchedulerOutput, Launched] | None = None

    def turn(self) -> Outcome:
        """Launch a step; count the one launched by the last turn."""
        scheduler, before, self._before = self._scheduler, self._before, None
        if before is not None:
            scheduler.advance_with_placeholders(before[0])
        step, error = scheduler.schedule(), None
        if step is not None:
            try:
                self._before = step, self._runner.launch(step)
            except Exception as failure:  # an interrupt goes through: then everything is computed again
                scheduler.rollback(step)
                error = _explained(failure, step)
        sampled = [] if before is None else _aligned(before[0], before[1].read())
        advanced = scheduler.apply_tokens(sampled)
        if self._before is not None and not scheduler.running:
            self._drop(self._before[0])
        return Outcome(advanced, step is None and before is None, error)

    def abandon(self) -> None:
        """What the device still writes, it writes before anything launched from now on."""
        self._before = None

    def _drop(self, step: SchedulerOutput) -> None:
        """Count a launched step all of whose requests have ended, without reading it."""
        self._before = None
        self._scheduler.advance_with_placeholders(step)
        self._scheduler.apply_tokens([None] * len(step.scheduled))


def make_loop(scheduler: Scheduler, runner: Runner) -> Loop:
    """The loop that goes with a scheduler."""
    if isinstance(scheduler, OverlapScheduler) and isinstance(runner, Launches):
        return OverlapLoop(scheduler, runner)
    return SerialLoop(scheduler, runner)


def _aligned(step: SchedulerOutput, sampled: Sequence[SampledToken | None]) -> Sequence[SampledToken | None]:
    if [token is not None for token in sampled] != [item.samples for item in step.scheduled]:
        raise PagedAttnError("the runner must return a token exactly where the step samples: please report it")
    return sampled


def _explained(error: BaseException, step: SchedulerOutput) -> BaseException:
    if not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return error
    explained = CapacityError(
        f"out of memory in a step of {step.num_tokens} tokens, which was taken back ({error}); "
        "lower max_num_batched_tokens or gpu_memory_utilization, or abort requests"
    )
    explained.__cause__ = error
    return explained
