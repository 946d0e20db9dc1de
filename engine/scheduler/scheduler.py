"""Steps that come to count or not: `schedule` proposes one and takes its blocks, `update` or `rollback` ends it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagedattn.errors import PagedAttnError

from ..kv.manager import KVCacheManager
from ..request import Request, RequestStatus
from ..scheduler_output import SampledToken, SchedulerOutput
from .planner import StepPlanner, by_arrival


class Scheduler(StepPlanner):
    """A StepPlanner whose steps are carried out one at a time, and counted."""

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can run. Each step must go to `update` or `rollback` before the next."""
        if self._in_flight is not None:
            raise PagedAttnError("schedule() was called before update() or rollback() of the step before")
        plan = self._plan()
        self._in_flight, self._swapped_out = plan.step(), plan.swapped_out
        if self._in_flight is None:
            self._lose_swapped()
        return self._in_flight

    def update(
        self, step: SchedulerOutput | None, sampled: Sequence[SampledToken | None]
    ) -> list[tuple[Request, SampledToken | None]]:
        """Make a step count, now that its keys and values are in the cache.

        Args:
            step: the step in flight, or None where `schedule` returned None.
            sampled: aligned with `step.scheduled`.

        Returns:
            Requests that got a token or ended, each with its token. What ended without one comes with None.
        """
        advanced: list[tuple[Request, SampledToken | None]] = [(request, None) for request in self._ended]
        self._ended = []
        if step is None:
            return advanced
        if step is not self._in_flight:
            raise PagedAttnError("update() got another step than the one in flight")
        self._count(step)
        for item, token in zip(step.scheduled, sampled, strict=True):
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue
            if token is not None and token.error is not None:
                self.kv.discard(request)
                self.finish(request, RequestStatus.FINISHED_ERROR, token.error)
                advanced.append((request, None))
                continue
            computed = request.num_computed_tokens = item.start + item.num_tokens
            if computed >= request.commit_at:
                self.kv.commit(request)
            if item.samples and token is not None:
                request.token_ids.append(token.token_id)
                advanced.append((request, token))
                may_end = len(request.token_ids) >= request.max_total_tokens or token.token_id in request.stop_ids
                if may_end and (status := request.ending()) is not None:
                    self.finish(request, status)
        self.stats.generated_tokens += sum(token is not None for _, token in advanced)
        for request, _ in self._admitted:
            self.kv.swap.drop(request)
        self._in_flight = None
        return advanced

    def rollback(self, step: SchedulerOutput) -> None:
        """Take back a step that failed: progress, tables, keys and queues are as before `schedule`.

        Only what was preempted for its sake stays preempted, and is computed again even if it was to be swapped: those
        blocks may have been written to, before they were copied or after.
        """
        if step is not self._in_flight:
            raise PagedAttnError("rollback() got another step than the one in flight")
        for request, status in reversed(self._admitted):
            if request.status is RequestStatus.RUNNING:
                del self.running[bisect_left(self.running, request.arrival, key=by_arrival)]
                self._requeue(request, status)
        for item in step.scheduled:
            if item.request.status is RequestStatus.RUNNING:
                self.kv.trim(item.request)
        self._lose_swapped()
        self._admitted, self._in_flight = [], None
        self.stats.rollbacks += 1

    def restart(self, kv: KVCacheManager, requests: Iterable[Request]) -> None:
        """Begin again with an empty cache and all unfinished `requests` waiting, whatever state an interrupt left."""
        self.kv, self.running, self.waiting = kv, [], OrderedDict()
        self._in_flight, self._admitted, self._swapped_out = None, [], []
        for request in sorted(requests, key=by_arrival):
            if not request.finished:
                request.status = request.ending() or request.status
            if not request.finished:
                computed = request.num_computed_tokens or (
                    request.swapped.num_computed_tokens if request.swapped else 0
                )
                self.stats.recomputed_tokens += computed
                request.clear_cache_state()
                request.swapped = None
                request.status = RequestStatus.WAITING if not request.num_generated else RequestStatus.PREEMPTED
                self.waiting[request.request_id] = request

    def _lose_swapped(self) -> None:
        """What the last step was to swap out must be computed again."""
        for request in self._swapped_out:
            if request.swapped is not None:
                self.stats.recomputed_tokens += request.swapped.num_computed_tokens
                self.kv.swap.drop(request)
        self._swapped_out = []

    def _count(self, step: SchedulerOutput) -> None:
        stats = self.stats
        stats.steps += 1
        stats.scheduled_tokens += step.num_tokens
        stats.swaps += len(self._swapped_out)
        stats.swapped_out_blocks += len(step.swap_out)
        stats.swapped_in_blocks += len(step.swap_in)
        for request, _ in self._admitted:
            if request.swapped is not None:
                continue
            stats.cached_tokens += request.num_cached_tokens
            stats.queried_tokens += len(request.token_ids)
            if request.num_prompt_hits is None:
                request.num_prompt_hits = request.num_cached_tokens
