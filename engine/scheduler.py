"""What runs in each step: one token budget, running requests first, then waiting ones, oldest first in both.

`schedule` proposes a step and takes the blocks that it needs; `update` makes it count, `rollback` takes it back. Both
queues are ordered by arrival. Where blocks are short the newest running request is preempted (its blocks are freed, it
is computed again later) and waits before all others; a request is never preempted for a newer one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from pagedattn.errors import PagedAttnError

from .kv_cache_manager import KVCacheManager
from .request import Request, RequestStatus
from .stats import Counters
from .step import SampledToken, ScheduledRequest, Step

_WATERMARK = 0.01
_STEPS_PER_RETRY = 16
_by_arrival = attrgetter("arrival")


class _Plan:
    """A step in the making: what of the budget is left, and the blocks that its prompts will need later."""

    __slots__ = ("budget", "copies", "decodes", "prefills", "reserved")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.reserved = 0
        self.decodes: list[ScheduledRequest] = []
        self.prefills: list[ScheduledRequest] = []
        self.copies: list[tuple[int, int]] = []


class Scheduler:
    """Decides, for requests that it was given, which tokens run next. Knows no model and no text."""

    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_prefill_share: float = 1.0
    ) -> None:
        """Schedule over the blocks of `kv`.

        Args:
            max_num_seqs: most running requests; never more than the budget, so that each decode gets its token.
            max_num_batched_tokens: token budget of a step.
            max_prefill_share: most of the budget that one prompt takes in a step.
        """
        self.kv = kv
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.budget = max_num_batched_tokens
        self.max_chunk = max(1, int(max_num_batched_tokens * max_prefill_share))
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.stats = Counters()
        self._in_flight: Step | None = None
        self._admitted: list[tuple[Request, RequestStatus]] = []
        self._ended: list[Request] = []
        self._refused, self._refused_at = "", 0

    def add(self, request: Request) -> None:
        """Queue a request that is newer than all others."""
        self.waiting[request.request_id] = request

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` can be computed when it has the whole cache."""
        return self.kv.blocks_for(num_tokens, 1) <= self.kv.pool.num_usable

    def finish(self, request: Request, status: RequestStatus, explanation: str | None = None) -> bool:
        """End a request in any state and free its blocks; False, and nothing done, where it has ended before."""
        if request.finished:
            return False
        if request.status is RequestStatus.RUNNING:
            del self.running[bisect_left(self.running, request.arrival, key=_by_arrival)]
        else:
            del self.waiting[request.request_id]
        request.status, request.explanation = status, explanation
        self.kv.free(request)
        return True

    def schedule(self) -> Step | None:
        """The next step, or None where nothing can run. Each step must go to `update` or `rollback` before the next."""
        if self._in_flight is not None:
            raise PagedAttnError("schedule() was called before update() or rollback() of the step before")
        self._admitted = []
        plan, preemptions = _Plan(self.budget), self.stats.preemptions
        self._schedule_running(plan)
        if self.stats.preemptions == preemptions:
            self._schedule_waiting(plan)
        if plan.decodes or plan.prefills:
            self._in_flight = Step((*plan.decodes, *plan.prefills), len(plan.decodes), tuple(plan.copies))
        return self._in_flight

    def update(
        self, step: Step | None, sampled: Sequence[SampledToken | None]
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
            if computed >= request.next_commit:
                self.kv.commit(request)
            if item.samples and token is not None:
                request.token_ids.append(token.token_id)
                advanced.append((request, token))
                may_end = len(request.token_ids) >= request.max_total_tokens or token.token_id in request.stop_ids
                if may_end and (status := request.ending()) is not None:
                    self.finish(request, status)
        self.stats.generated_tokens += sum(token is not None for _, token in advanced)
        self._in_flight = None
        return advanced

    def rollback(self, step: Step) -> None:
        """Take back a step that failed: progress, tables, keys and queues are as before `schedule`.

        Only what was preempted for its sake stays preempted: those blocks may have been written to.
        """
        if step is not self._in_flight:
            raise PagedAttnError("rollback() got another step than the one in flight")
        for request, status in reversed(self._admitted):
            if request.status is RequestStatus.RUNNING:
                del self.running[bisect_left(self.running, request.arrival, key=_by_arrival)]
                self._requeue(request, status)
        for item in step.scheduled:
            if item.request.status is RequestStatus.RUNNING:
                self.kv.trim(item.request)
        self._admitted, self._in_flight = [], None
        self.stats.rollbacks += 1

    def restart(self, kv: KVCacheManager, requests: Iterable[Request]) -> None:
        """Begin again with an empty cache and all unfinished `requests` waiting, whatever state an interrupt left."""
        self.kv, self.running, self.waiting = kv, [], OrderedDict()
        self._in_flight, self._admitted = None, []
        for request in sorted(requests, key=_by_arrival):
            if not request.finished:
                request.status = request.ending() or request.status
            if not request.finished:
                self.stats.recomputed_tokens += request.num_computed_tokens
                request.clear_cache_state()
                request.status = RequestStatus.WAITING if not request.num_generated else RequestStatus.PREEMPTED
                self.waiting[request.request_id] = request

    def _schedule_running(self, plan: _Plan) -> None:
        """Decodes and running prompts, oldest first."""
        budget, index, running = plan.budget, 0, self.running
        while index < len(running):
            request = running[index]
            index += 1
            start, length = request.num_computed_tokens, len(request.token_ids)
            if length >= request.max_total_tokens:  # it ends when its last token is read
                continue
            remaining = num_tokens = length - start
            if remaining > 1:
                # Every request behind this one is left a token of the budget, so prompts never starve decodes.
                num_tokens = min(remaining, self.max_chunk, budget - (len(running) - index))
            if start + num_tokens > request.num_slots:
                num_tokens = self._grow(request, num_tokens)
                if not num_tokens:
                    continue
            budget -= num_tokens
            item = ScheduledRequest(request, start, num_tokens, num_tokens == remaining)
            (plan.decodes if num_tokens == 1 else plan.prefills).append(item)
            if num_tokens != remaining:
                plan.reserved += self._outstanding(item)
        plan.budget = budget

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests, oldest first, until one does not fit."""
        while self.waiting and plan.budget and len(self.running) < self.max_num_seqs:
            request = next(iter(self.waiting.values()))
            parent = request.fork_of
            if parent is not None and parent.status is RequestStatus.RUNNING and not request.num_generated:
                if parent.num_computed_tokens < parent.prompt_len:
                    break
                plan.copies += self.kv.fork(parent, request, self._headroom(plan)) or ()
            if not request.num_slots and (self._is_known_not_to_fit(request) or not self._admit(request, plan)):
                break
            item = self._enter(request, plan.budget)
            plan.budget -= item.num_tokens
            (plan.decodes if item.num_tokens == 1 and item.start else plan.prefills).append(item)
            plan.reserved += self._outstanding(item)

    def _is_known_not_to_fit(self, request: Request) -> bool:
        """Whether nothing was freed since this request did not fit, so that looking it up again can be saved.

        Now and then it is looked up all the same: a running request may have cached its beginning meanwhile.
        """
        unchanged = self._refused == request.request_id and self.kv.pool.num_free <= self._refused_at
        return unchanged and self.stats.steps % _STEPS_PER_RETRY > 0

    def _admit(self, request: Request, plan: _Plan) -> bool:
        """Take the blocks of a waiting request's first chunk, if the rest of it will find room too."""
        hit = self.kv.lookup(request)
        total = len(request.token_ids)
        chunk = min(total - hit.num_tokens, self.max_chunk, plan.budget)
        if self.running:
            rest = self.kv.blocks_for(total, chunk) - self.kv.blocks_for(hit.num_tokens + chunk, chunk)
            fits = self.kv.start(request, hit, chunk, self._headroom(plan) + rest)
            self._refused, self._refused_at = "" if fits else request.request_id, self.kv.pool.num_free
            return fits
        while chunk and not self.kv.start(request, hit, chunk):
            chunk //= 2
        if not chunk:
            self._end_for_lack_of_room(request)
        return chunk > 0

    def _enter(self, request: Request, budget: int) -> ScheduledRequest:
        """Move a waiting request, which has its blocks, to the running ones."""
        del self.waiting[request.request_id]
        self._admitted.append((request, request.status))
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        remaining = len(request.token_ids) - (start := request.num_computed_tokens)
        num_tokens = min(remaining, self.max_chunk, budget, request.num_slots - start)
        return ScheduledRequest(request, start, num_tokens, num_tokens == remaining)

    def _grow(self, request: Request, num_tokens: int) -> int:
        """Get blocks for `num_tokens` more; returns for how many there are blocks in this step.

        Newer requests are preempted, newest first. The newest itself only waits for the older ones, which run in this
        step and will end; if it is alone nothing will free a block, so it takes a smaller chunk or ends.
        """
        while not self.kv.allocate_slots(request, num_tokens):
            newest = self.running[-1]
            if newest is not request:
                self.running.pop()
                self.stats.preemptions += 1
                newest.num_preemptions += 1
                self.stats.recomputed_tokens += newest.num_computed_tokens
                self._requeue(newest, RequestStatus.PREEMPTED)
            elif len(self.running) > 1:
                return 0
            elif num_tokens > 1:
                num_tokens //= 2
            else:
                self._end_for_lack_of_room(request)
                return 0
        return num_tokens

    def _requeue(self, request: Request, status: RequestStatus) -> None:
        """Put a request that left the running ones before all waiting ones, without blocks."""
        self.kv.free(request)
        request.status = status
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _end_for_lack_of_room(self, request: Request) -> None:
        usable, tokens = self.kv.pool.num_usable, len(request.token_ids)
        explanation = f"{tokens} tokens of this request alone fill the KV cache of {usable} blocks; raise num_kv_blocks"
        self.finish(request, RequestStatus.FINISHED_LENGTH, explanation)
        self._ended.append(request)

    def _headroom(self, plan: _Plan) -> int:
        """Blocks to leave free at an admission, so that running requests can grow before anyone is preempted."""
        if not self.running:
            return 0
        growth = len(self.running) * len(self.kv.block_sizes)
        return plan.reserved + max(int(_WATERMARK * self.kv.pool.num_usable), growth)

    def _outstanding(self, item: ScheduledRequest) -> int:
        """Blocks that a prompt still needs after its chunk, windows aside: those give back as many as they take."""
        end, total = item.start + item.num_tokens, len(item.request.token_ids)
        sizes = zip(self.kv.block_sizes, self.kv.windows, strict=True)
        return sum(-(-total // size) - -(-end // size) for size, window in sizes if window is None)

    def _count(self, step: Step) -> None:
        stats = self.stats
        stats.steps += 1
        stats.scheduled_tokens += step.num_tokens
        for request, _ in self._admitted:
            stats.cached_tokens += request.num_cached_tokens
            stats.queried_tokens += len(request.token_ids)
            if request.num_prompt_hits is None:
                request.num_prompt_hits = request.num_cached_tokens
