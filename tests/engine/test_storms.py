"""Storms: far more work than blocks, aborts all the time, signals at any moment. Nothing is lost and nothing leaks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from covers import values
from fake_runner import FakeRunner, expected, fake_llm, greedy
from invariants import check_idle, check_scheduler, run_out
from scheduler_bench import Bench, prompt

from pagedattn.engine import KVGroup
from pagedattn.engine.api.llm import LLM

GROUPS = {
    "full": [KVGroup(4)],
    "hybrid": [KVGroup(4), KVGroup(4, 12)],
    "open": [KVGroup(4), KVGroup(4, recent_blocks=40)],
    "recent": [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=600, window_blocks=2)],
}


@pytest.mark.cover(by=values)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", GROUPS)
def test_ten_times_more_requests_than_blocks(name: str, mode: str) -> None:
    """96 requests of 64 tokens in a tenth of the blocks that they need have the tokens of requests left alone."""
    groups, prompts = GROUPS[name], [prompt(6 + index % 7, index) for index in range(96)]
    layers = [group for group in groups if group.recent_blocks is None]
    needed = sum(group.blocks_for(len(tokens) + 63, 1) for tokens in prompts for group in layers)
    bench = Bench(1 + needed // 10, groups, seqs=64, budget=128, swap_blocks=needed if mode == "swap" else 0)
    # Admission that leaves room to grow would calm the storm.
    bench.scheduler._headroom = lambda plan: 0  # type: ignore[method-assign]
    for tokens in prompts:
        bench.add(tokens, 64)
    bench.finish(limit=20_000)
    stats = bench.scheduler.stats
    assert stats.preemptions >= 100 and all(request.num_generated == 64 for request in bench.requests)
    # Where blocks are encoded once they are full, what is in another is computed again: at most 3 of 4 tokens.
    again = 3 * stats.preemptions if len(groups) > len(layers) else 0
    assert stats.swaps == 0 if mode == "recompute" else stats.swaps == stats.preemptions or again > 0
    assert (stats.recomputed_tokens <= again) == (mode == "swap") and (stats.swapped_in_blocks > 0) == (mode == "swap")
    assert max(request.num_preemptions for request in bench.requests) < 64 and not bench.requests[0].num_preemptions


@pytest.mark.parametrize(
    "groups", [[KVGroup(4), KVGroup(4, 9)], GROUPS["open"], GROUPS["recent"]], ids=["hybrid", "open", "recent"]
)
def test_a_thousand_aborts_leak_no_block(groups: list[KVGroup]) -> None:
    """In every third step a request is aborted, in each state as often, while others come, run, are swapped and end."""
    draw = random.Random(5)
    llm = fake_llm(
        FakeRunner(24 if groups[-1].sliding_window else 16, groups, swap_blocks=60),
        max_num_batched_tokens=24,
        max_prefill_share=0.2,
    )
    live: dict[str, list[int]] = {}
    states: Counter[str] = Counter()
    aborts = ended = 0
    while aborts < 1000:
        while len(live) < 16:
            tokens = [draw.randrange(5) for _ in range(draw.randrange(1, 20))]
            live[llm.add_request(tokens, greedy(30, n=draw.choice([1, 1, 2])))] = tokens
        if draw.random() < 0.35:
            by_state: dict[str, list[str]] = {}
            for name in live:
                by_state.setdefault(state_of(llm, name), []).append(name)
            state = draw.choice(sorted(by_state))
            name = draw.choice(by_state[state])
            assert llm.abort(name) and not llm.abort(name)
            states[state] += 1
            aborts += 1
        for output in llm.step():
            tokens = live.pop(output.request_id)
            assert list(output.token_ids) == expected(tokens, greedy(30))[: len(output.token_ids)]
            ended += output.finish_reason == "length"
        check_scheduler(llm._scheduler)
    for name in live:
        llm.abort(name)
    run_out(llm)
    check_idle(llm)
    assert ended > 20
    assert not {name: states[name] for name in ("WAITING", "RUNNING", "swapped", "mid-prompt") if states[name] < 10}
    assert llm.reset_prefix_cache() and llm.stats().num_cached_blocks == 0


def state_of(llm: LLM, name: str) -> str:
    """Where the first completion of a request is."""
    if name not in llm._owners:
        return "first completion ended"
    request = llm._owners[name][1].request
    if request.swapped is not None:
        return "swapped"
    return "mid-prompt" if 0 < request.num_computed_tokens < request.prompt_len else request.status.name


def test_sigint_at_random_moments_leaves_the_engine_usable() -> None:
    """In a process of its own, which gets the signals whatever runs these tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", "import sigint_storm; sigint_storm.main()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
