"""Random traffic, faults and aborts: invariants S1 to S9, every token right, no stall, no leak.

200,000 steps under --grid; otherwise a 20th of them, and as often as it takes until everything has happened.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from random_work import everything, part_of
from scheduler_simulation import Simulation

from pagedattn.engine import KVGroup

STEPS = 20_000
SHARE, MOST = 20, 6
FULL = [KVGroup(4)]
HYBRID = [KVGroup(4), KVGroup(4, 7)]
GEMMA3 = [KVGroup(4), *[KVGroup(4, 9)] * 3]
OPEN = [KVGroup(4), KVGroup(4, recent_blocks=13)]
FEW_OPEN = [KVGroup(4), KVGroup(4, recent_blocks=6)]
RECENT = [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=30, window_blocks=2)]
FEW_RECENT = [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=11, window_blocks=2)]
FIRST = [KVGroup(4, window_blocks=1, first_blocks=1), KVGroup(4, None, 30, 1, 1)]
FEW_FIRST = [KVGroup(4, first_blocks=2), KVGroup(4, None, 11, 0, 2)]
UNEQUAL = [KVGroup(4), KVGroup(8, 10)]
CASES: dict[str, tuple[int, list[KVGroup], dict[str, Any]]] = {
    "ample": (150, FULL, {}),
    "recompute": (30, FULL, {}),
    "swap": (30, FULL, {"swap_blocks": 200}),
    "little swap": (30, FULL, {"swap_blocks": 8, "max_num_batched_tokens": 15}),
    "swap where it costs less": (30, FULL, {"swap_blocks": 200, "tokens_per_swapped_block": 3.7}),
    "uncached": (30, FULL, {"caching": False, "swap_blocks": 60}),
    "hybrid": (40, HYBRID, {"max_prefill_share": 0.5}),
    "hybrid swap": (40, HYBRID, {"swap_blocks": 100, "max_prefill_share": 0.5}),
    "mostly windows": (46, GEMMA3, {"swap_blocks": 40}),
    "prefixes in host memory": (30, FULL, {"swap_blocks": 14, "keeps_prefixes": True, "tokens_per_swapped_block": 2.5}),
    "prefixes of windows": (40, HYBRID, {"swap_blocks": 20, "keeps_prefixes": True}),
    "outgrown": (15, FULL, {"swap_blocks": 30}),
    "unequal blocks": (38, UNEQUAL, {"swap_blocks": 60}),
    "open blocks": (30, OPEN, {"swap_blocks": 60, "max_prefill_share": 0.5}),
    "open blocks recompute": (30, OPEN, {}),
    "ample but for open blocks": (150, [KVGroup(4), KVGroup(4, recent_blocks=5)], {"max_prefill_share": 0.3}),
    "windows of recent blocks": (30, RECENT, {"swap_blocks": 60, "max_prefill_share": 0.5}),
    "recent blocks recompute": (30, RECENT, {}),
    "recent blocks uncached": (30, RECENT, {"caching": False}),
    "ample but for recent blocks": (150, FEW_RECENT, {"max_prefill_share": 0.3}),
    "first blocks": (30, FIRST, {"swap_blocks": 60, "max_prefill_share": 0.5}),
    "ample but for first blocks": (150, FEW_FIRST, {"max_prefill_share": 0.3}),
    "few recent blocks": (30, FEW_RECENT, {"swap_blocks": 14, "keeps_prefixes": True}),
    "few open blocks": (30, FEW_OPEN, {"swap_blocks": 14, "keeps_prefixes": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_random_traffic(name: str) -> None:
    num_blocks, groups, options = CASES[name]
    wanted = {"rollbacks", "copies", "mixed", "chunks", "stop", "length", "error"}
    wanted |= {"aborted while waiting", "aborted while running"}
    wanted |= {"hits", "passed over"} if options.get("caching", True) else set()
    wanted |= {"preemptions", "recomputed"} if "ample" not in name else set()
    wanted |= {"no room"} if name == "outgrown" else set()
    wanted |= {"recent copies"} if groups[-1].recent_blocks else set()
    wanted |= {"released"} if len(groups) > 1 else set()
    swapped = {"swapped out", "swapped in", "loads" if "keeps_prefixes" in options else "aborted while swapped"}
    wanted |= swapped if "swap_blocks" in options else set()
    if not everything and "swap_blocks" in options:  # too rare for a part of the work
        wanted -= {"recomputed"}
    seen: Counter[str] = Counter()
    for seed in range(20260801, 20260801 + MOST):
        simulation = Simulation(seed, num_blocks, groups, **options)
        simulation.run(part_of(STEPS, SHARE))
        assert simulation.seen["steps"] >= part_of(STEPS, SHARE)
        assert "ample" not in name or not simulation.seen["preemptions"]
        seen += simulation.seen
        if all(seen[event] >= part_of(10, 10) for event in wanted):
            break
    assert not {event: seen[event] for event in wanted if seen[event] < part_of(10, 10)}


def test_the_cases_are_200_000_steps() -> None:
    assert STEPS * len(CASES) >= 200_000


def test_same_seed_gives_the_same_trace() -> None:
    traces = []
    for _ in range(2):
        simulation = Simulation(3, *CASES["swap"][:2], **CASES["swap"][2])
        simulation.run(500)
        traces.append((simulation.seen, simulation.scheduler.stats))
    assert traces[0] == traces[1]
