"""Steps that come to count or not: `schedule` proposes one and takes its blocks; then it counts, or `rollback` ends it.

It counts in two halves. After `advance_with_placeholders` each token that the step samples stands as PLACEHOLDER_TOKEN
at its request's end; `apply_tokens` puts the tokens in place and ends the requests that they end. In between, while the
device is busy, the next step may be scheduled: steps run one after another there, so blocks that a late end frees may
be handed out at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagedattn.errors import PagedAttnError

from ..kv.manager import KVCacheManager
from ..request import Request, RequestStatus
from ..scheduler_output import PLACEHOLDER_TOKEN, SampledToken, SchedulerOutput
from .base import BaseScheduler, by_arrival
from .output_builder import SchedulerOutputBuilder

Advanced = list[tuple[Request, SampledToken | None]]


class Scheduler(BaseScheduler):
    """A BaseScheduler whose steps are carried out one at a time, and counted."""

    # The step whose tokens are placeholders, and what its requests had that gave their blocks back meanwhile.
    _assumed: SchedulerOutput | None = None
    _gone: dict[Request, tuple[list, list[int], int]]

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can run. Each must count or be taken back before the next."""
        if self._in_flight is not None:
            raise PagedAttnError("schedule() came before advance_with_placeholders() or rollback() of the last step")
        plan = self._plan()
        self._in_flight, self._swapped_out = plan.step(), plan.swapped_out
        if self._in_flight is None:
            self._lose_swapped()
            self.kv.copies.settle(succeeded=False)
        return self._in_flight

    def advance_with_placeholders(self, step: SchedulerOutput) -> None:
        """Count the step in flight as computed. Its input tokens are all known by now: `apply_tokens` came since."""
        if step is not self._in_flight:
            raise PagedAttnError("advance_with_placeholders() got another step than the one in flight")
        self._count(step)
        self._gone = {}
        running = RequestStatus.RUNNING
        for request, start, num_tokens, samples in step.scheduled:
            if request.status is not running:
                self.stats.dropped_tokens += num_tokens
                continue
            computed = request.num_computed_tokens = start + num_tokens
            if computed >= request.commit_at:
                self.kv.commit(request)
            if samples:
                request.token_ids.append(PLACEHOLDER_TOKEN)
        for request, _ in self._admitted:  # what was swapped in is read before anything is swapped out to its place
            self.kv.swap.drop(request)
        self.kv.copies.settle(succeeded=True)
        self._in_flight, self._assumed = None, step

    def apply_tokens(self, sampled: Sequence[SampledToken | None]) -> Advanced:
        """Put the tokens of the last step in place.

        Args:
            sampled: aligned with its `scheduled`; empty where `schedule` returned None.

        Returns:
            Requests that got a token or ended, each with its token. What ended without one comes with None.
        """
        items = () if self._assumed is None else self._assumed.scheduled
        self._assumed, advanced, ended, self._ended = None, [], self._ended, []
        for (request, *_), token in zip(items, sampled, strict=True):
            if token is None or request.token_ids[-1] != PLACEHOLDER_TOKEN:
                continue
            if token.error is not None:
                request.token_ids.pop()
                self._fail(request, token.error)
                advanced.append((request, None))
                continue
            request.token_ids[-1] = token_id = token.token_id
            advanced.append((request, token))
            may_end = len(request.token_ids) >= request.max_total_tokens or token_id in request.stop_ids
            if may_end and (status := request.ending()) is not None and not self.finish(request, status):
                request.status, request.explanation = status, None  # it ended for lack of room, not knowing this
        self.stats.generated_tokens += sum(token is not None for _, token in advanced)
        seen = {request for request, _ in advanced} if ended else ()
        return advanced + [(request, None) for request in ended if request not in seen]

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
        self.kv.copies.settle(succeeded=False)
        self._admitted, self._in_flight = [], None
        self.stats.rollbacks += 1

    def restart(self, kv: KVCacheManager, requests: Iterable[Request]) -> None:
        """Begin again with an empty cache and all unfinished `requests` waiting, whatever state an interrupt left.

        Tokens that were not read are sampled again.
        """
        self.kv, self.running, self.waiting = kv, [], OrderedDict()
        self._in_flight, self._assumed, self._admitted, self._swapped_out = None, None, [], []
        for request in sorted(requests, key=by_arrival):
            while request.token_ids[-1] == PLACEHOLDER_TOKEN:
                request.token_ids.pop()
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

    def _fail(self, request: Request, why: str) -> None:
        """End a request whose values are not to be trusted, also where its blocks were given back meanwhile."""
        if request in self._gone:
            request.last_prefix_nodes, request.num_cached_blocks, request.num_cached_tokens = self._gone[request]
        if request.last_prefix_nodes or request.swapped is not None:
            self.kv.discard(request)
        if not self.finish(request, RequestStatus.FINISHED_ERROR, why):
            request.status, request.explanation = RequestStatus.FINISHED_ERROR, why

    def _preempt(self, victim: Request, plan: SchedulerOutputBuilder) -> None:
        self._remember(victim)
        super()._preempt(victim, plan)

    def _requeue(self, request: Request, status: RequestStatus) -> None:
        self._remember(request)
        super()._requeue(request, status)

    def _end_for_lack_of_room(self, request: Request) -> None:
        self._remember(request)
        super()._end_for_lack_of_room(request)

    def _remember(self, request: Request) -> None:
        """Keep what of a request's blocks carries keys, in case its token turns out to be an error."""
        if self._assumed is not None and request.token_ids[-1] == PLACEHOLDER_TOKEN and request.last_prefix_nodes:
            self._gone[request] = request.last_prefix_nodes, request.num_cached_blocks, request.num_cached_tokens

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
