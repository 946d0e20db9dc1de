"""What runs in a step: one token budget, running requests first, then waiting ones, oldest first in both.

Both queues are ordered by arrival. Where blocks are short the newest running request is preempted (its blocks are
freed; it is computed again later, or they are swapped to host memory and back) and waits before all others; a request
is never preempted for a newer one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import takewhile
from operator import attrgetter

from ..kv.manager import KVCacheManager
from ..request import Request, RequestStatus
from ..scheduler_output import SchedulerOutput
from .counters import Counters
from .output_builder import SchedulerOutputBuilder

_WATERMARK = 0.01
_STEPS_PER_RETRY = 16
by_arrival = attrgetter("arrival")


class BaseScheduler:
    """The requests, and the choice of what they compute next. Knows no model, no text and no outcome of a step."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_share: float = 1.0,
        tokens_per_swapped_block: float = 0.0,
    ) -> None:
        """Schedule over the blocks of `kv`.

        Args:
            max_num_seqs: most running requests; never more than the budget, so that each decode gets its token, nor
                than `kv.most_requests`, so that each has a block for what is not encoded.
            max_num_batched_tokens: token budget of a step.
            max_prefill_share: most of the budget that one prompt takes in a step.
            tokens_per_swapped_block: a preempted request is swapped, where there is room, if it has more computed
                tokens than this many per block.
        """
        self.kv = kv
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens, kv.most_requests)
        self.budget = max_num_batched_tokens
        self.max_chunk = max(1, int(max_num_batched_tokens * max_prefill_share))
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.stats = Counters()
        self._tokens_per_swapped_block = tokens_per_swapped_block
        # The step that is being carried out, and the requests that it admits or preempts.
        self._in_flight: SchedulerOutput | None = None
        self._swapped_out: list[Request] = []
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
            del self.running[bisect_left(self.running, request.arrival, key=by_arrival)]
        else:
            del self.waiting[request.request_id]
        request.status, request.explanation = status, explanation
        self.kv.free(request)
        self.kv.swap.drop(request)
        return True

    def _plan(self) -> SchedulerOutputBuilder:
        """What runs next. Nothing is admitted in a step that preempts."""
        self._admitted = []
        plan, preemptions = SchedulerOutputBuilder(self.kv, self.budget), self.stats.preemptions
        self._schedule_running(plan)
        if self.stats.preemptions == preemptions:
            self._schedule_waiting(plan)
        return plan

    def _schedule_running(self, plan: SchedulerOutputBuilder) -> None:
        """Decodes and running prompts, oldest first."""
        index, running = 0, self.running
        while index < len(running):
            request = running[index]
            index += 1
            start, length = request.num_computed_tokens, len(request.token_ids)
            if length >= request.max_total_tokens:  # it ends when its last token is read
                continue
            remaining = num_tokens = length - start
            if remaining == 1 and 0 < start < request.num_slots:
                plan.add_decode(request)
                continue
            if remaining > 1:
                # Every request behind this one is left a token of the budget, so prompts never starve decodes.
                num_tokens = min(remaining, self.max_chunk, plan.budget - (len(running) - index))
                if self.kv.recent_pool is not None:
                    num_tokens = max(1, self.kv.fit_recent(start, num_tokens, self._num_without_open(index)))
            if start + num_tokens > request.num_slots:
                num_tokens = self._grow(request, num_tokens, plan)
            if num_tokens:
                plan.add(request, num_tokens)

    def _num_without_open(self, index: int) -> int:
        """How many running requests from `index` on need a block for their next token that is not full."""
        size = self.kv.block_sizes[-1]
        return sum(request.num_computed_tokens % size == 0 for request in self.running[index:])

    def _schedule_waiting(self, plan: SchedulerOutputBuilder) -> None:
        """Admit waiting requests, oldest first, until one does not fit; pass over those that gain by waiting a step."""
        passed_over = []
        while self.waiting and plan.budget and len(self.running) < self.max_num_seqs:
            request = next(iter(self.waiting.values()))
            if self._should_wait(request, plan):
                passed_over.append(self.waiting.pop(request.request_id))
                continue
            if request.fork_of is not None:
                self._fork(request.fork_of, request, plan)
            if not request.num_slots and (self._is_known_not_to_fit(request) or not self._admit(request, plan)):
                break
            self._enter(request, plan)
        self._put_first(passed_over)

    def _should_wait(self, request: Request, plan: SchedulerOutputBuilder) -> bool:
        """Whether this step computes what the request can share with another once it is computed."""
        parent = request.fork_of
        if parent is not None and parent.status is RequestStatus.RUNNING and not request.num_generated:
            return parent.num_computed_tokens < parent.prompt_len or parent.swapped is not None
        return request.swapped is None and plan.coming.serve(request)

    def _fork(self, parent: Request, request: Request, plan: SchedulerOutputBuilder) -> None:
        """Let a completion share the prompt of the first one, if that still runs and there is room."""
        if parent.status is RequestStatus.RUNNING and not request.num_generated and request.swapped is None:
            plan.copies += self.kv.fork(parent, request, self._headroom(plan)) or ()

    def _is_known_not_to_fit(self, request: Request) -> bool:
        """Whether nothing was freed since this request did not fit, so that looking it up again can be saved.

        Now and then it is looked up all the same: a running request may have cached its beginning meanwhile.
        """
        unchanged = self._refused == request.request_id and self.kv.pool.num_free <= self._refused_at
        return unchanged and self.stats.steps % _STEPS_PER_RETRY > 0

    def _admit(self, request: Request, plan: SchedulerOutputBuilder) -> bool:
        """Take the blocks of a waiting request's first chunk, if the rest of it will find room too."""
        if request.swapped is not None and self._swap_in(request, request.swapped.num_computed_tokens, plan):
            return True
        if request.swapped is not None:
            return False
        hit = self.kv.lookup(request)
        chunk = self._chunk(request, hit.num_tokens, plan)
        if not chunk:
            return False
        if self.running:
            return self._noted(
                request, self.kv.start(request, hit, chunk, self._room(request, hit.num_tokens, chunk, plan))
            )
        while chunk and not self.kv.start(request, hit, chunk):
            chunk //= 2
        if not chunk:
            self._end_for_lack_of_room(request)
        return chunk > 0

    def _swap_in(self, request: Request, computed: int, plan: SchedulerOutputBuilder) -> bool:
        """Bring a swapped request back, if there is room; one that was lost, or has no room alone, is dropped."""
        chunk = self._chunk(request, computed, plan)
        if not chunk:
            return False
        pairs = self.kv.swap_in(request, chunk, self._room(request, computed, chunk, plan))
        if pairs is not None:
            plan.swap_in += pairs
            return True
        if request.swapped is None or not self.running:
            self.stats.recomputed_tokens += computed
            self.kv.swap.drop(request)
        else:
            self._noted(request, False)
        return False

    def _chunk(self, request: Request, computed: int, plan: SchedulerOutputBuilder) -> int:
        """Tokens of a waiting request that this step can take; none where running ones have all of `recent_pool`."""
        most = min(len(request.token_ids) - computed, self.max_chunk, plan.budget)
        return self.kv.fit_entering(computed, most)

    def _enter(self, request: Request, plan: SchedulerOutputBuilder) -> None:
        """Move a waiting request, which has its blocks, to the running ones."""
        del self.waiting[request.request_id]
        self._admitted.append((request, request.status))
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=by_arrival)
        start = request.num_computed_tokens
        remaining = len(request.token_ids) - start
        plan.add(request, min(remaining, self.max_chunk, plan.budget, request.num_slots - start))

    def _grow(self, request: Request, num_tokens: int, plan: SchedulerOutputBuilder) -> int:
        """Get blocks for `num_tokens` more; returns for how many there are blocks in this step.

        Newer requests are preempted, newest first. The newest itself only waits for the older ones, which run in this
        step and will end; if it is alone nothing will free a block, so it takes a smaller chunk or ends.
        """
        while not self.kv.allocate_slots(request, num_tokens):
            if self.running[-1] is not request:
                self._preempt(self.running.pop(), plan)
            elif len(self.running) > 1:
                return 0
            elif num_tokens > 1:
                num_tokens //= 2
            else:
                self._end_for_lack_of_room(request)
                return 0
        return num_tokens

    def _preempt(self, victim: Request, plan: SchedulerOutputBuilder) -> None:
        """Take the blocks of a request that left the running ones: by swap where that costs less and there is room."""
        self.stats.preemptions += 1
        victim.num_preemptions += 1
        computed = victim.num_computed_tokens
        blocks = sum(len(table) - gone for table, gone in zip(victim.block_ids, victim.num_released, strict=True))
        pairs = self.kv.swap_out(victim) if computed > blocks * self._tokens_per_swapped_block else None
        kept = 0 if victim.swapped is None else victim.swapped.num_computed_tokens
        self.stats.recomputed_tokens += computed - kept
        if pairs is not None:
            plan.swap_out += pairs
            plan.swapped_out.append(victim)
        self._requeue(victim, RequestStatus.PREEMPTED)

    def _requeue(self, request: Request, status: RequestStatus) -> None:
        """Put a request that left the running ones back in its place among the waiting ones, without blocks."""
        self.kv.free(request)
        request.status = status
        older = takewhile(lambda other: other.arrival < request.arrival, self.waiting.values())
        self._put_first([*older, request])

    def _put_first(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self.waiting[request.request_id] = request
            self.waiting.move_to_end(request.request_id, last=False)

    def _end_for_lack_of_room(self, request: Request) -> None:
        usable, tokens = self.kv.pool.num_usable, len(request.token_ids)
        explanation = f"{tokens} tokens of this request alone fill the KV cache of {usable} blocks; raise num_kv_blocks"
        self.finish(request, RequestStatus.FINISHED_LENGTH, explanation)
        self._ended.append(request)

    def _room(self, request: Request, computed: int, chunk: int, plan: SchedulerOutputBuilder) -> int:
        """Blocks that must stay free when a request enters with `chunk` tokens after `computed` ones."""
        if not self.running:
            return 0
        rest = self.kv.blocks_for(len(request.token_ids), chunk) - self.kv.blocks_for(computed + chunk, chunk)
        return self._headroom(plan) + rest

    def _noted(self, request: Request, fits: bool) -> bool:
        self._refused, self._refused_at = "" if fits else request.request_id, self.kv.pool.num_free
        return fits

    def _headroom(self, plan: SchedulerOutputBuilder) -> int:
        """Blocks to leave free at an admission, so that running requests can grow before anyone is preempted."""
        if not self.running:
            return 0
        growth = len(self.running) * len(self.kv.layer_groups)
        return plan.reserved + max(int(_WATERMARK * self.kv.pool.num_usable), growth)
