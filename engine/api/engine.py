"""The engine: takes requests, runs steps, keeps requests apart from each other's faults."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pagedattn import BlockPool
from pagedattn.errors import EngineDeadError, PagedAttnError, QueueFullError, RequestError, UnsupportedError

from ..config import EngineConfig
from ..kv.manager import KVCacheManager
from ..request import RequestStatus
from ..runner_protocol import HasPlaceholders, Launches, Runner
from ..sampling_params import SamplingParams
from ..scheduler.loop import StepLoop
from ..scheduler.scheduler import Advanced, Scheduler
from .admission import CheckedRequest, OutputQueue, TrackedRequest, check_name, check_request, sequence_names
from .outputs import RequestOutput, SequenceOutput, TokenDelta
from .prompts import Prompt, refuse_placeholders
from .stats import EngineStats, Metrics


class Engine:
    """Continuous batching over one runner, driven by calls of `step` from one thread at a time.

    Whatever a step raises (the model, an interrupt), the engine stays usable: the step is taken back, or, where an
    interrupt struck in the middle of bookkeeping, all unfinished requests are computed again with an empty cache.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        """Serve `runner`, whose cache belongs to this engine alone."""
        self.config = config
        self.runner = runner
        overlaps = isinstance(runner, Launches) and (
            runner.prefers_overlap if config.overlap is None else config.overlap
        )
        self._scheduler = Scheduler(
            self._new_cache(),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_share=config.max_prefill_share,
            tokens_per_swapped_block=0.0 if config.preemption == "swap" else runner.swap_config.tokens_per_block,
        )
        self._loop = StepLoop(self._scheduler, runner, overlaps)
        self._placeholders = runner.placeholder_tokens if isinstance(runner, HasPlaceholders) else {}
        self._metrics = Metrics(config.log_interval)
        self._tracked: dict[str, TrackedRequest] = {}
        self._owners: dict[str, tuple[TrackedRequest, SequenceOutput]] = {}
        self._inbox, self._streams = OutputQueue(), OutputQueue(streams=True)
        # The thread that drives the engine holds both locks, an abort only the second.
        self._driven, self._lock = threading.Lock(), threading.Lock()
        self._pending_aborts: deque[str] = deque()
        self._dirty = False
        self._dead: EngineDeadError | None = None
        self._random = random.Random(config.seed)
        self._arrivals = 0
        self._names = 0

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        skip_prefix_cache_reads: bool = False,
        stream: bool = False,
    ) -> str:
        """Queue a prompt; its output comes from a later `step`.

        Args:
            prompt: text (where there is a tokenizer) or token ids.
            request_id: a name of your own, unique among requests whose output `step` has not returned; None makes one.
            cache_salt: only requests with an equal salt share cached blocks; None shares with all without one.
            skip_prefix_cache_reads: compute the whole prompt, whatever is cached.
            stream: its output comes piece by piece from `take_deltas` instead.

        Returns:
            The request's id.

        Raises:
            RequestError: the request cannot be served; no other request is affected.
            QueueFullError: as many requests wait as may (`max_waiting`).
        """
        try:
            checked = self._check(prompt, sampling_params, cache_salt, skip_prefix_cache_reads)
        except RequestError as error:
            raise RequestError(str(error), request_id if isinstance(request_id, str) else None) from None
        return self._queue(checked, self._streams if stream else self._inbox, request_id, limit=self.config.max_waiting)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns those requests of `add_request` that have ended since the last call.

        Raises:
            CapacityError: the device ran out of memory. The step was taken back; abort something or call again.
            EngineDeadError: the device failed for good; so does every later call.
            UnsupportedError: another thread is in the engine.
        """
        self._advance()
        outputs = list(self._inbox.outputs.values())
        self._inbox.outputs.clear()
        return outputs

    def take_deltas(self) -> list[TokenDelta]:
        """What the steps since the last call added to the requests of `add_request(stream=True)`, in their order."""
        taken = list(self._streams.deltas)
        self._streams.deltas.clear()
        return taken

    def abort(self, request_id: str) -> bool:
        """End a request in any state; its blocks are free at once and its output says "abort".

        Safe from any thread and from within a step (it then happens at the step's end). False for an id that is
        unknown or has ended.

        Raises:
            EngineDeadError: the device failed for good, and this request with it.
        """
        if request_id not in self._tracked:
            return False
        self._pending_aborts.append(request_id)
        if not self._lock.locked():
            with self._lock:
                self._run_deferred()
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests hold blocks."""
        with self._exclusive():
            return self._scheduler.kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Queues, blocks, counters and step times as they are now."""
        return self._metrics.look(self._scheduler)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request, of whichever caller, has not ended, or one that has waits for `step` to return it."""
        return bool(self._tracked or self._inbox.outputs)

    def _check(
        self, prompt: Prompt, sampling: SamplingParams | None, cache_salt: str | None, skip_reads: bool
    ) -> CheckedRequest:
        """Check one request without queueing it; RequestError where it cannot be served."""
        checked = check_request(prompt, sampling, cache_salt, skip_reads, self.runner, self._scheduler)
        refuse_placeholders(checked.token_ids, self._placeholders)
        return checked

    def _queue(
        self,
        checked: CheckedRequest,
        inbox: OutputQueue,
        request_id: str | None = None,
        prompt_index: int = 0,
        limit: int | None = None,
    ) -> str:
        """Queue a checked request whose output goes to `inbox`, where no more than `limit` wait; returns its id."""
        with self._exclusive():
            n = checked.sampling.n
            name = self._name(request_id, n)
            if limit is not None and n > limit:
                raise RequestError(f"n must be at most {limit} (max_waiting), got {n}; raise max_waiting", name)
            if limit is not None and len(self._scheduler.waiting) + n > limit:
                raise QueueFullError(f"at most {limit} requests may wait (max_waiting); try again later", name)
            tracked = TrackedRequest(name, checked, inbox, prompt_index)
            tracked.open_sequences(self.runner, self._arrivals, self._random)
            self._dirty = True
            inbox.ids.add(name)
            self._arrivals += len(tracked.sequences)
            self._tracked[name] = tracked
            for sequence in tracked.sequences:
                self._owners[sequence.request.request_id] = (tracked, sequence)
                self._scheduler.add(sequence.request)
            self._dirty = False
        return name

    def _advance(self) -> None:
        """Take a turn of the loop and put what it produced into the inboxes."""
        with self._exclusive():
            self._dirty, started = True, time.perf_counter()
            try:
                advanced, idle, error = self._loop.turn()
            except EngineDeadError as failure:
                self._dead = failure
                raise
            if idle and not advanced and self._tracked:
                raise PagedAttnError("no request can make progress: a defect of the scheduler, please report it")
            self._report(advanced)
            self._dirty = False
            self._metrics.saw_step(started, self._scheduler)
            if isinstance(error, EngineDeadError):
                self._dead = error
            if error is not None:
                raise error
            self._run_deferred()

    def _abort_all(self, inbox: OutputQueue) -> None:
        """Abort everything that `inbox` still waits for; nothing on a dead engine, so that its error stays visible."""
        for request_id in list(inbox.ids) if self._dead is None else ():
            self.abort(request_id)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One caller at a time."""
        if self._driven.locked():
            raise UnsupportedError(
                "the engine is in use by another thread, or called from within its own step; "
                "drive it from one thread (abort alone may come from anywhere)"
            )
        with self._driven, self._lock:
            self._run_deferred()
            yield

    def _run_deferred(self) -> None:
        """Repair what an interrupt left half done, then do the aborts that came during a step."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead
        if self._dirty:
            self._repair()
        while self._pending_aborts:
            self._abort(self._pending_aborts[0])  # an interrupt in there leaves it to be done
            self._pending_aborts.popleft()

    def _report(self, advanced: Advanced) -> None:
        """Hand what a step produced to its sequences. Tokens that no caller streams are only timed."""
        now, running, owners = time.perf_counter(), RequestStatus.RUNNING, self._owners
        for request, sampled in advanced:
            tracked, sequence = owners[request.request_id]
            if sampled is not None:
                sequence.saw_token(now)
                if sequence.token_by_token:
                    sequence.push(sampled)
            if sequence.token_by_token or request.status is not running:
                self._finish_sequence(tracked, sequence, now)

    def _finish_sequence(self, tracked: TrackedRequest, sequence: SequenceOutput, now: float) -> None:
        """End what its text ends, deliver what is new, and forget what has ended."""
        request, verdict = sequence.request, sequence.verdict
        if verdict is not None and not self._scheduler.finish(request, verdict, sequence.problem):
            request.status = verdict
        tracked.deliver(sequence, sequence.finish(now) if request.finished else None)
        if request.finished:
            self._owners.pop(request.request_id, None)
            if tracked.ended:
                self._tracked.pop(tracked.request_id, None)

    def _abort(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self._dirty = True
        now = time.perf_counter()
        for sequence in tracked.sequences:
            if self._scheduler.finish(sequence.request, RequestStatus.FINISHED_ABORT):
                self._finish_sequence(tracked, sequence, now)
        self._dirty = False

    def _repair(self) -> None:
        """Make everything consistent again from the requests' tokens alone, which only ever grow."""
        open_sequences = [
            (tracked, sequence)
            for tracked in self._tracked.values()
            for sequence in tracked.sequences
            if sequence.index not in tracked.completions
        ]
        self._loop.abandon()
        self._owners = {pair[1].request.request_id: pair for pair in open_sequences}
        self._scheduler.restart(self._new_cache(), [sequence.request for _, sequence in open_sequences])
        now = time.perf_counter()
        for tracked, sequence in open_sequences:
            sequence.replay()
            if sequence.token_by_token or sequence.request.finished:
                self._finish_sequence(tracked, sequence, now)
        self._tracked = {name: tracked for name, tracked in self._tracked.items() if not tracked.ended}
        self._dirty = False

    def _new_cache(self) -> KVCacheManager:
        pool = BlockPool(self.runner.num_kv_blocks, enable_caching=self.config.enable_prefix_caching)
        swap = self.runner.swap_config
        return KVCacheManager(pool, self.runner.kv_groups, swap.num_blocks, swap.keeps_prefixes)

    def _name(self, request_id: str | None, n: int) -> str:
        """The id asked for, or a new one, that no unfinished request or completion has, nor an output not taken yet."""
        if request_id is None:
            self._names += 1
            while self._is_taken(f"request-{self._names}", n):
                self._names += 1
            return f"request-{self._names}"
        name = check_name(request_id)
        if any(other in self._inbox.outputs for other in sequence_names(name, n)):
            raise RequestError("request_id has ended, and step() has not returned its output yet; call it first", name)
        if self._is_taken(name, n):
            raise RequestError("request_id is taken by an unfinished request; choose another or abort it", name)
        return name

    def _is_taken(self, name: str, n: int) -> bool:
        taken = self._owners, self._tracked, self._inbox.outputs
        return any(other in names for other in sequence_names(name, n) for names in taken)
