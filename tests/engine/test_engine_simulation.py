"""Random traffic, faults and aborts on small caches: every token right, every block accounted for, at every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_runner import EOS, VOCAB, FakeRunner, LaunchingRunner, expected, fake_llm
from invariants import check_idle, check_scheduler
from random_work import everything, part_of

from pagedattn.engine import KVGroup, SchedulerOutput
from pagedattn.engine.api.outputs import RequestOutput
from pagedattn.engine.sampling_params import SamplingParams

SEEDS = part_of(4, 2)
STEPS = 1000
MAX_MODEL_LEN = 72


class InjectedFault(Exception):
    """The model failed."""


class Simulation:
    """One engine under random traffic; `seen` counts what happened."""

    def __init__(self, seed: int, num_blocks: int, groups: Sequence[KVGroup], options: dict[str, object]) -> None:
        self.random = random.Random(seed)
        host = {name: options[name] for name in ("swap_blocks", "keeps_prefixes") if name in options}
        options = {name: value for name, value in options.items() if name not in host}
        kind = LaunchingRunner if options.get("overlap") else FakeRunner
        self.runner = kind(
            num_blocks,
            groups,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[EOS],
            **host,  # type: ignore[arg-type]
        )
        self.runner.before = self.runner.after = self.maybe_fail
        self.runner.broken = lambda request: self.breaks_at.get(request.request_id) == request.num_generated
        self.llm = fake_llm(self.runner, **options)
        self.documents = [[self.random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        self.live: dict[str, tuple[list[int], SamplingParams]] = {}
        self.breaks_at: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.seen: Counter[str] = Counter()

    def maybe_fail(self, step: SchedulerOutput) -> None:
        if self.random.random() < 0.03:
            raise InjectedFault

    def add(self) -> None:
        draw = self.random
        prompt = draw.choice(self.documents)[: draw.randrange(1, 40)] + [draw.randrange(VOCAB)] * draw.randrange(4)
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(1000),
            max_tokens=draw.choice([1, 5, 20, None]),
            min_tokens=draw.choice([0, 1]),
            stop_token_ids=draw.sample(range(VOCAB), draw.choice([0, 0, 6])),
            n=draw.choice([1, 1, 1, 3]),
        )
        salt, skip = draw.choice([None, None, "a", "b"]), draw.random() < 0.1
        name = self.llm.add_request(prompt, sampling, cache_salt=salt, skip_prefix_cache_reads=skip)
        self.live[name] = prompt, sampling
        if draw.random() < 0.12:
            self.breaks_at[name] = draw.randrange(4)

    def step(self) -> None:
        scheduler = self.llm._scheduler
        preemptions = scheduler.stats.preemptions
        try:
            outputs = self.llm.step()
        except InjectedFault:
            self.seen["faults"] += 1
            return
        for output in outputs:
            self.check_output(output)
        assert scheduler.stats.preemptions == preemptions or not scheduler._admitted, "admitted while preempting"
        if self.runner.steps:
            step = self.runner.steps.pop()
            assert step.num_tokens <= scheduler.budget and len(step.scheduled) <= scheduler.max_num_seqs
            assert max(item.num_tokens for item in step.scheduled) <= scheduler.max_chunk
            self.seen["chunks"] += sum(not item.samples for item in step.scheduled)
            self.seen["copies"] += len(step.copies)
            self.seen["recent copies"] += len(step.recent_copies)
            self.seen["mixed"] += 0 < step.num_decodes < len(step.scheduled)
            self.seen["released"] += sum(any(item.request.num_released) for item in step.scheduled)

    def abort(self) -> None:
        name = self.random.choice([name for name in self.live if name not in self.aborted])
        self.aborted.add(name)
        # A turn whose launch failed may have ended it all the same: then its output waits for the next step().
        ended = name in self.llm._inbox.outputs
        assert self.llm.abort(name) == (not ended)
        assert not self.llm.abort(name)
        self.seen["aborts"] += 1

    def reset(self) -> None:
        swap, copies = self.llm._scheduler.kv.swap, self.llm._scheduler.kv.copies
        idle = not self.llm._scheduler.running and swap.num_free + len(copies) == swap.num_blocks
        assert self.llm.reset_prefix_cache() == idle
        self.seen["resets" if idle else "refused resets"] += 1

    def check_output(self, output: RequestOutput) -> None:
        prompt, sampling = self.live.pop(output.request_id)
        assert len(output.outputs) == sampling.n
        self.seen["hits"] += output.cached_tokens
        for index, completion in enumerate(output.outputs):
            seeded = replace(sampling, seed=(sampling.seed or 0) + index)
            truth = expected(prompt, seeded, MAX_MODEL_LEN, eos=[EOS])
            tokens, reason = list(completion.token_ids), completion.finish_reason
            self.seen[reason] += 1
            self.seen["explained"] += reason == "length" and completion.explanation is not None
            if reason in ("abort", "error") or completion.explanation is not None:
                assert tokens == truth[: len(tokens)]
            else:
                assert tokens == truth
                ended = truth[-1] in (EOS, *sampling.stop_token_ids) and len(truth) >= sampling.min_tokens
                assert reason == ("stop" if ended else "length")

    def run(self, steps: int) -> None:
        actions = [(self.step, 20), (self.add, 4), (self.abort, 1), (self.reset, 1)]
        for _ in range(steps):
            (action,) = self.random.choices([a for a, _ in actions], [weight for _, weight in actions])
            full, empty = len(self.live) > 12, self.live.keys() <= self.aborted
            if not (action == self.add and full) and not (action == self.abort and empty):
                action()
            check_scheduler(self.llm._scheduler)
        self.runner.before = self.runner.after = lambda step: None
        for _ in range(3000):
            if not self.llm.has_unfinished:
                break
            self.step()
            check_scheduler(self.llm._scheduler)
        self.seen["drained"] += not self.llm.has_unfinished
        check_idle(self.llm)
        self.reset()
        assert self.llm.stats().num_cached_blocks == 0
        counters = self.llm.stats().counters
        self.seen["preemptions"] += counters.preemptions
        self.seen["rollbacks"] += counters.rollbacks
        self.seen["dropped"] += counters.dropped_tokens
        self.seen["unknown"] += getattr(self.runner, "unknown", 0)
        self.seen["swapped out"] += counters.swapped_out_blocks
        self.seen["swapped in"] += counters.swapped_in_blocks
        self.seen["recomputed"] += counters.recomputed_tokens


FULL = [KVGroup(4)]
HYBRID = [KVGroup(4), KVGroup(4, 7)]
UNEQUAL = [KVGroup(4), KVGroup(8, 10), KVGroup(4, 3)]
RECENT = [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=22, window_blocks=2)]
CASES = {
    "ample": (120, FULL, {}),
    "tight": (26, FULL, {"max_num_batched_tokens": 17}),
    "single chunk tokens": (26, FULL, {"max_num_batched_tokens": 16, "max_prefill_share": 0.05}),
    "uncached": (26, FULL, {"enable_prefix_caching": False}),
    "hybrid": (50, HYBRID, {"max_num_batched_tokens": 16, "max_prefill_share": 0.5}),
    "hybrid uncached": (50, HYBRID, {"enable_prefix_caching": False}),
    "window only": (8, [KVGroup(4, 9)], {"max_num_batched_tokens": 17}),
    "unequal blocks": (60, UNEQUAL, {"max_num_batched_tokens": 24}),
    "swap": (26, FULL, {"swap_blocks": 200}),
    "little swap": (26, FULL, {"swap_blocks": 9, "max_num_batched_tokens": 17}),
    "swap uncached": (26, FULL, {"swap_blocks": 200, "enable_prefix_caching": False}),
    "swap hybrid": (42, HYBRID, {"swap_blocks": 200, "max_num_batched_tokens": 16, "max_prefill_share": 0.5}),
    "swap unequal blocks": (60, UNEQUAL, {"swap_blocks": 40, "preemption": "swap"}),
    "swap prefixes": (26, FULL, {"swap_blocks": 60, "keeps_prefixes": True}),
    "swap prefixes hybrid": (50, HYBRID, {"swap_blocks": 60, "keeps_prefixes": True, "max_num_batched_tokens": 16}),
    "one by one": (26, [KVGroup(3)], {"max_num_seqs": 1}),
    "swap open blocks": (26, [KVGroup(4), KVGroup(4, recent_blocks=17)], {"swap_blocks": 60}),
    "swap recent open blocks": (26, RECENT, {"swap_blocks": 60}),
    "first open blocks": (26, [KVGroup(4, window_blocks=1, first_blocks=1), KVGroup(4, None, 22, 1, 1)], {}),
    "recent open blocks uncached": (26, RECENT, {"enable_prefix_caching": False, "swap_blocks": 60}),
    "few open blocks": (26, [KVGroup(4), KVGroup(4, recent_blocks=5)], {"max_num_batched_tokens": 17}),
    "open blocks uncached": (26, [KVGroup(4), KVGroup(4, recent_blocks=9)], {"enable_prefix_caching": False}),
    "tokens are blocks": (100, [KVGroup(1), KVGroup(2, 1)], {}),
}


def events(name: str, overlap: bool) -> set[str]:
    """What has to happen to a case."""
    groups, options = CASES[name][1:]
    wanted = {"faults", "rollbacks", "aborts", "resets", "chunks", "stop", "length", "abort", "error", "mixed"}
    wanted |= {"hits", "copies"} if options.get("enable_prefix_caching", True) else {"copies"}
    wanted |= {"preemptions"} if name not in ("ample", "one by one") else set()
    wanted |= {"dropped", "unknown"} if overlap else set()
    wanted |= {"released"} if any(group.sliding_window for group in groups) else set()
    wanted |= {"recent copies", "released"} if "open" in name else set()
    wanted |= {"swapped out", "swapped in", "recomputed"} if "swap" in name else set()
    wanted -= {"mixed", "copies"} if name == "one by one" else set()
    wanted -= {"copies"} if name == "tokens are blocks" else set()
    if not everything:  # too rare for a part of the work
        wanted -= {"recomputed"}
    return wanted


def facets(name: str, overlap: bool) -> list[object]:
    """A step in flight meets what moves or holds blocks."""
    return [name, *((overlap, word, word in name) for word in ("swap", "open", "hybrid", "uncached"))]


@pytest.mark.cover(by=facets)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("name", CASES)
def test_random_traffic(name: str, overlap: bool) -> None:
    """All seeds under --grid, else no more than it takes until everything has happened."""
    seen: Counter[str] = Counter()
    wanted = events(name, overlap)
    for seed in range(SEEDS):
        num_blocks, kinds, more = CASES[name]
        simulation = Simulation(seed, num_blocks, kinds, {**more, "overlap": overlap})
        simulation.run(STEPS)
        assert simulation.seen["drained"] == 1
        seen += simulation.seen
        if not everything and wanted <= seen.keys():
            break
    missing = {event for event in wanted if not seen[event]}
    assert not missing, f"never happened: {missing}"


def test_same_seed_gives_the_same_trace() -> None:
    traces = []
    for _ in range(2):
        simulation = Simulation(7, *CASES["tight"])
        simulation.run(200)
        traces.append((simulation.seen, simulation.llm.stats().counters))
    assert traces[0] == traces[1]
