"""StepLoop: from step to step, one after another, or each launched before the tokens of the last are read.

Both give the same tokens. Overlapped, the host's work on a step happens while the device is busy with the one before;
what a token of that one ends runs one step too many, whose result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pagedattn.errors import CapacityError, PagedAttnError, describe_error

from ..runner_protocol import Launches, Runner
from ..scheduler_output import SampledToken, SchedulerOutput
from .scheduler import Advanced, Scheduler

_Read = Callable[[], Sequence[SampledToken | None]]


class Outcome(NamedTuple):
    """What a turn did: requests that advanced, whether there was anything to run, and why a step failed.

    A step that failed was taken back.
    """

    advanced: Advanced
    idle: bool
    error: BaseException | None = None


class StepLoop:
    """Where an engine gets its turns from. What `turn` raises leaves the scheduler in the middle of something."""

    def __init__(self, scheduler: Scheduler, runner: Runner, overlap: bool) -> None:
        """Run the steps of `scheduler`.

        Args:
            overlap: launch each step before the tokens of the last are read; the runner `Launches`.
        """
        self._scheduler, self._runner = scheduler, runner
        self._launcher = runner if overlap and isinstance(runner, Launches) else None
        self._launched: tuple[SchedulerOutput, _Read] | None = None

    @property
    def overlap(self) -> bool:
        """Whether steps are launched before the tokens of the last are read."""
        return self._launcher is not None

    def turn(self) -> Outcome:
        """Run a step and count it; or, overlapped, launch a step and count the one launched by the last turn."""
        scheduler, before, self._launched = self._scheduler, self._launched, None
        if before is not None:
            scheduler.advance_with_placeholders(before[0])
        step, error = scheduler.schedule(), None
        if step is not None:
            try:
                self._launched = step, self._launch(step)
            except BaseException as failure:
                # What was launched before is not read yet: an interrupt goes through, all is computed again.
                if self.overlap and not isinstance(failure, Exception):
                    raise
                scheduler.rollback(step)
                error = _explained(failure, step)
        if not self.overlap and self._launched is not None:
            before, self._launched = self._launched, None
            scheduler.advance_with_placeholders(before[0])
        advanced = scheduler.apply_tokens([] if before is None else before[1]())
        if self._launched is not None and not scheduler.running:
            self._drop(self._launched[0])
        return Outcome(advanced, step is None and before is None, error)

    def abandon(self) -> None:
        """Forget what was launched; the scheduler is about to restart.

        What the device still writes, it writes before anything launched from now on.
        """
        self._launched = None

    def _launch(self, step: SchedulerOutput) -> _Read:
        """Begin a step, or run it; returns what waits for its tokens."""
        if self._launcher is None:
            tokens = _aligned(step, self._runner.execute(step))
            return lambda: tokens
        launched = self._launcher.launch(step)
        return lambda: _aligned(step, launched.read())

    def _drop(self, step: SchedulerOutput) -> None:
        """Count a launched step all of whose requests have ended, without reading it."""
        self._launched = None
        self._scheduler.advance_with_placeholders(step)
        self._scheduler.apply_tokens([None] * len(step.scheduled))


def _aligned(step: SchedulerOutput, sampled: Sequence[SampledToken | None]) -> Sequence[SampledToken | None]:
    if [token is not None for token in sampled] != [item.samples for item in step.scheduled]:
        raise PagedAttnError("the runner must return a token exactly where the step samples: please report it")
    return sampled


def _explained(error: BaseException, step: SchedulerOutput) -> BaseException:
    if not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return error
    explained = CapacityError(
        f"out of memory in a step of {step.num_tokens} tokens, which was taken back ({describe_error(error)}); "
        "lower max_num_batched_tokens or gpu_memory_utilization, or abort requests"
    )
    explained.__cause__ = error
    return explained
