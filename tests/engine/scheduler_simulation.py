"""A scheduler under random traffic, with a model so cheap that what is checked costs more than what is simulated.

The state after a prefix is one 64-bit number, and so is what a slot holds: a request whose table holds other numbers
than its own tokens give reads somebody else's values. Whole tables are compared when a request enters and when it
ends, one position of each in every step between.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from invariants import check_scheduler
from scheduler_bench import update

from pagedattn import BlockPool
from pagedattn.engine import (
    KVCacheManager,
    KVGroup,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.scheduler.scheduler import Scheduler

VOCAB = 50
STOP = frozenset([7])
MAX_LIVE = 14
MAX_AGE = 400
CHECK_EVERY = 25
_MASK = (1 << 64) - 1
_ENDED = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def extend(state: int, token: int) -> int:
    """The state after one more token."""
    state = (state ^ (token + 1)) * 0x9E3779B97F4A7C15 & _MASK
    return state ^ state >> 29


def sample(state: int, seed: int, position: int) -> int:
    """S8: the next token depends on the tokens before it, the request's seed and its position, and on nothing else."""
    return extend(state ^ seed, position) % VOCAB


def root(salt: str | None) -> int:
    return extend(12345, ord(salt) if salt else 0)


class Simulation:
    """One scheduler; `seen` counts what happened."""

    def __init__(self, seed: int, num_blocks: int, groups: Sequence[KVGroup], **options: Any) -> None:
        self.random = random.Random(seed)
        self.sizes = [group.block_size for group in groups]
        self.windows = [group.sliding_window for group in groups]
        self.has_recent, self.window = groups[-1].recent_blocks is not None, groups[-1].window_blocks
        host = options.pop("swap_blocks", 0)
        pool = BlockPool(num_blocks, enable_caching=options.pop("caching", True))
        self.kv = KVCacheManager(pool, groups, host, options.pop("keeps_prefixes", False))
        self.scheduler = Scheduler(self.kv, **{"max_num_seqs": 6, "max_num_batched_tokens": 24, **options})
        self.scheduler.finish = self.finish  # type: ignore[method-assign]
        self.ends: dict[str, int] = {}
        counts = [group.recent_blocks or num_blocks for group in groups]
        self.slots = [[[0] * size for _ in range(count)] for size, count in zip(self.sizes, counts, strict=True)]
        self.host: list[list[list[int]]] = [[[] for _ in range(host)] for _ in self.sizes]
        self.states: dict[str, list[int]] = {}
        self.live: dict[str, Request] = {}
        self.born: dict[str, int] = {}
        self.turns: Counter[str] = Counter()
        self.documents = [array("i", [self.random.randrange(VOCAB) for _ in range(40)]) for _ in range(3)]
        self.arrivals = self.now = self.needed = self.generated = 0
        self.seen: Counter[str] = Counter()
        load = self.kv.copies.load
        self.kv.copies.load = lambda *copy: (self.seen.update(["loads"]), load(*copy))[1]  # type: ignore[method-assign]

    def run(self, steps: int) -> None:
        draw = self.random.random
        while self.scheduler.stats.steps + self.scheduler.stats.rollbacks < steps:
            while len(self.live) < MAX_LIVE and draw() < 0.25:
                self.add()
            if draw() < 0.02 and self.live:
                self.abort()
            self.step(draw() < 0.02)
        while self.live:
            self.step(False)
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.kv.pool.num_free == self.kv.pool.num_usable and self.kv.swap.num_requests == 0
        assert self.kv.recent_pool is None or self.kv.recent_pool.num_free == self.kv.recent_pool.num_usable
        self.check_accounts()
        assert self.kv.reset_prefix_cache() and self.kv.pool.num_cached == 0
        assert self.kv.swap.num_free == self.kv.swap.num_blocks

    def add(self) -> None:
        """A request, or three that share one prompt; most begin like one of a few documents."""
        draw = self.random
        prompt = draw.choice(self.documents)[: draw.randrange(41)] + array("i", [draw.randrange(VOCAB)])
        salt, limit = draw.choice([None, None, None, "a"]), len(prompt) + draw.choice([1, 4, 12, 24])
        skip, first = draw.random() < 0.05, None
        for _ in range(draw.choice([1, 1, 1, 1, 3])):
            seed, name = draw.getrandbits(40), str(self.arrivals)
            options: dict[str, Any] = {"arrival": self.arrivals, "max_total_tokens": limit, "stop_ids": STOP}
            request = Request(name, prompt[:], _ENDED, seed=seed, cache_salt=salt, **options)
            request.skip_prefix_cache_reads, request.fork_of = skip, first
            first = first or request
            self.live[name], self.born[name], self.states[name] = request, self.now, []
            self.arrivals += 1
            self.scheduler.add(request)

    def abort(self) -> None:
        swapped = [request for request in self.live.values() if request.swapped is not None]
        request = self.random.choice(swapped or list(self.live.values()))
        state = "swapped" if request.swapped is not None else request.status.name.lower()
        assert self.scheduler.finish(request, RequestStatus.FINISHED_ABORT)
        assert not self.scheduler.finish(request, RequestStatus.FINISHED_ABORT)
        self.seen[f"aborted while {state}"] += 1
        self.end(request)

    def step(self, fails: bool) -> None:
        """Schedule, check, run, and make it count or take it back."""
        self.now += 1
        before = {request.request_id: request.num_preemptions for request in self.scheduler.running}
        waiting = set(self.scheduler.waiting)
        step = self.scheduler.schedule()
        self.check_queues(step, before, waiting)
        if step is None:
            advanced = update(self.scheduler, None, [])
            assert advanced or not self.live, "S3: nothing runs and nothing ends"
        else:
            if not fails or self.random.random() < 0.5:
                sampled = self.execute(step)
            if fails:
                self.scheduler.rollback(step)
                self.seen["rollbacks"] += 1
                check_scheduler(self.scheduler)
                return
            advanced = update(self.scheduler, step, sampled)
        for request, token in advanced:
            self.generated += token is not None
            if request.finished:
                self.check_end(request)
        if self.now % CHECK_EVERY == 0:
            check_scheduler(self.scheduler)

    def execute(self, step: SchedulerOutput) -> list[SampledToken | None]:
        self.move(step)
        self.ends = {item.request.request_id: item.start + item.num_tokens for item in step.scheduled}
        for item in step.scheduled:
            request, start = item.request, item.start
            assert request.num_computed_tokens == start and request.status is RequestStatus.RUNNING
            first = self.turns[request.request_id] == 0 or item.num_tokens > 1 or step.swap_in
            self.check_context(request, start, every=bool(first))
            self.write(item)
            self.turns[request.request_id] += 1
        sampled: list[SampledToken | None] = []
        for item in step.scheduled:
            request, end = item.request, item.start + item.num_tokens
            assert item.samples == (end == len(request.token_ids))
            broken = request.seed % 97 == 0 and request.num_generated == 3
            token = sample(self.states[request.request_id][end - 1], request.seed, end)
            result = SampledToken(-1, error="NaN") if broken else SampledToken(token)
            sampled.append(result if item.samples else None)
        return sampled

    def move(self, step: SchedulerOutput) -> None:
        layers = len(self.kv.layer_groups)
        for slots, host in zip(self.slots[:layers], self.host[:layers], strict=True):
            for source, target in step.swap_out:
                host[target] = slots[source][:]
            for source, target in step.swap_in:
                slots[target] = host[source][:]
            for target, row in [(target, slots[source][:]) for source, target in step.copies]:
                slots[target] = row
        for target, row in [(target, self.slots[-1][source][:]) for source, target in step.recent_copies]:
            self.slots[-1][target] = row
        self.seen["recent copies"] += len(step.recent_copies)
        self.seen["swapped out"] += len(step.swap_out)
        self.seen["swapped in"] += len(step.swap_in)
        self.seen["copies"] += len(step.copies)
        self.seen["mixed"] += 0 < step.num_decodes < len(step.scheduled)

    def known(self, request: Request) -> list[int]:
        """What the slots of the request's tokens hold."""
        states = self.states[request.request_id]
        state = states[-1] if states else root(request.cache_salt)
        for token in request.token_ids[len(states) :]:
            state = extend(state, token)
            states.append(state)
        return states

    def write(self, item: ScheduledRequest) -> None:
        states, end = self.known(item.request), item.start + item.num_tokens
        for group, (slots, size, table) in enumerate(zip(self.slots, self.sizes, item.request.block_ids, strict=True)):
            pool = self.kv._pools[group]
            for position in range(item.start, end):
                block = table[position // size]
                assert block and pool.ref_count(block) == 1, "a shared block is written"
                if not self.has_recent or pool is self.kv.recent_pool:
                    slots[block][position % size] = states[position]
        if self.has_recent:
            full, recent = item.request.block_ids
            for entry in range(max(0, item.start // size - self.window), end // size - self.window):
                self.slots[0][full[entry]] = self.slots[1][recent[entry]][:]
        self.seen["chunks"] += not item.samples

    def check_context(self, request: Request, end: int, every: bool) -> None:
        """What the token at position `end` reads, or one position of it."""
        states = self.known(request)
        for slots, size, window, table in zip(self.slots, self.sizes, self.windows, request.block_ids, strict=True):
            low, high = 0 if window is None else max(0, end - window + 1), end
            if self.has_recent:
                full = max(0, end // size - self.window) * size
                kept = min(self.kv.groups[1].first_blocks * size, full)
                low, high = (full, end) if slots is self.slots[1] else (kept, full)
                if slots is self.slots[1] and every:
                    assert [slots[table[at // size]][at % size] for at in range(kept)] == states[:kept]
            if low < high:
                positions = range(low, high) if every else (low + self.now % (high - low),)
                for position in positions:
                    assert slots[table[position // size]][position % size] == states[position], f"{request} {position}"
            self.seen["released"] += low >= size

    def check_queues(self, step: SchedulerOutput | None, before: dict[str, int], waiting: set[str]) -> None:
        """S1, S2, S4 and S5."""
        scheduler = self.scheduler
        items = step.scheduled if step is not None else ()
        names = {item.request.request_id for item in items}
        assert sum(item.num_tokens for item in items) <= scheduler.budget
        assert len(items) == len(names) and len(scheduler.running) <= scheduler.max_num_seqs
        assert all(0 < item.num_tokens <= scheduler.max_chunk and not item.request.finished for item in items)
        victims = [one for one in map(self.live.get, before) if one and one.num_preemptions > before[one.request_id]]
        newest = scheduler.running[-1].arrival if scheduler.running else -1
        assert all(victim.arrival > newest for victim in victims), "S4: an older request gave way to a newer one"
        self.seen["preemptions"] += len(victims)
        if self.kv.recent_pool is not None and not victims and self.kv.pool.num_free > 40:
            assert len(scheduler.running) <= self.kv.recent_pool.num_usable
            idle = [one for one in scheduler.running if one.request_id not in names]
            assert all(len(one.token_ids) >= one.max_total_tokens for one in idle), "no block for a token"
        admitted = [item.request.arrival for item in items if item.request.request_id in waiting]
        if not admitted:
            return
        for request in scheduler.waiting.values():
            if request.arrival > max(admitted):
                break
            alike = [one for one in items if one.request.token_ids[0] == request.token_ids[0] and one.num_tokens > 1]
            assert alike or request.fork_of is not None, "S5: passed over without reason"
            self.seen["passed over"] += 1

    def check_end(self, request: Request) -> None:
        """S7 and S8: the tokens are those that the request gives alone; S4 and S6: it had no more turns than it may."""
        tokens, state = request.token_ids, root(request.cache_salt)
        for position, token in enumerate(tokens, 1):
            state = extend(state, token)
            if request.prompt_len <= position < len(tokens):
                assert tokens[position] == sample(state, request.seed, position)
        reason = request.status.finish_reason or ""
        expected = "stop" if tokens[-1] in STOP and request.num_generated else "length"
        assert reason == ("error" if reason == "error" else expected)
        assert request.explanation is not None or reason == "stop" or len(tokens) == request.max_total_tokens
        turns = len(tokens) * (1 + request.num_preemptions) + self.seen["rollbacks"]
        assert self.turns[request.request_id] <= turns and request.num_preemptions < 20
        age = self.now - self.born[request.request_id]
        assert age < MAX_AGE, "S4: a request starved"
        self.seen["oldest"] = max(self.seen["oldest"], age)
        self.seen["no room" if reason == "length" and request.explanation is not None else reason] += 1
        self.seen["hits"] += request.num_prompt_hits or 0
        self.end(request)

    def end(self, request: Request) -> None:
        for register in (self.live, self.born, self.states, self.turns):
            register.pop(request.request_id, None)

    def finish(self, request: Request, status: RequestStatus, explanation: str | None = None) -> bool:
        """In place of the scheduler's: notes how many tokens were computed for it, or taken from the cache."""
        computed = request.num_computed_tokens
        if not computed and request.swapped is not None:
            computed = request.swapped.num_computed_tokens
        if status is RequestStatus.FINISHED_ERROR:
            computed = self.ends[request.request_id]
        ended = Scheduler.finish(self.scheduler, request, status, explanation)
        self.needed += computed if ended else 0
        return ended

    def check_accounts(self) -> None:
        """S9."""
        stats = self.scheduler.stats
        assert stats.scheduled_tokens + stats.cached_tokens == self.needed + stats.recomputed_tokens
        assert stats.generated_tokens == self.generated and stats.rollbacks == self.seen["rollbacks"]
        assert stats.preemptions == self.seen["preemptions"]
        self.seen["recomputed"] += stats.recomputed_tokens
        self.seen["steps"] += stats.steps + stats.rollbacks
