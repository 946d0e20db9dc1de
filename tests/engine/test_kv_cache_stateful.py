"""KVCacheManager against a naive model: by hypothesis, and by long random runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kv_cache_machine import WEIGHTS, KVCacheMachine
from random_work import part_of

from pagedattn.engine import KVGroup

SHARE = 5
GROUPS = {
    "full": [KVGroup(3)],
    "window": [KVGroup(2, 5)],
    "hybrid": [KVGroup(2), KVGroup(2, 6)],
    "three": [KVGroup(2, 3), KVGroup(2), KVGroup(2, 8)],
    "unequal": [KVGroup(2), KVGroup(4, 5), KVGroup(3)],
    "open": [KVGroup(3), KVGroup(3, recent_blocks=9)],
    "recent": [KVGroup(3, window_blocks=2), KVGroup(3, recent_blocks=14, window_blocks=2)],
    "first": [KVGroup(3, window_blocks=1, first_blocks=2), KVGroup(3, None, 16, 1, 2)],
}


def four_bits(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 15


def operation(name: str) -> Any:
    def run(self: KVCacheRules, a: int, b: int) -> None:
        self.machine.step(name, a, b)

    run.__name__ = name
    return rule(a=st.integers(0, 2**16 - 1), b=st.integers(0, 2**16 - 1))(run)


class KVCacheRules(RuleBasedStateMachine):
    def __init__(self, groups: Sequence[KVGroup], total: Counter[str]) -> None:
        super().__init__()
        self.machine, self.total = KVCacheMachine(groups), total

    admit = operation("admit")
    admit_another = operation("admit")
    grow = operation("grow")
    grow_more = operation("grow")
    lookahead = operation("lookahead")
    fail = operation("fail")
    fork = operation("fork")
    finish = operation("finish")
    preempt = operation("preempt")
    discard = operation("discard")
    pressure = operation("pressure")
    relax = operation("relax")
    reset = operation("reset")
    drain = operation("drain")

    @invariant()
    def everyone_reads_its_own(self) -> None:
        self.machine.check()

    def teardown(self) -> None:
        self.machine.drain(0, 0)
        self.total.update(self.machine.counts)


@pytest.mark.parametrize("name", ["full", "hybrid", "open", "recent"])
def test_hypothesis_finds_no_wrong_value(name: str) -> None:
    total: Counter[str] = Counter()

    class Rules(KVCacheRules):
        def __init__(self) -> None:
            super().__init__(GROUPS[name], total)

    budget = settings(
        derandomize=True, deadline=None, database=None, max_examples=part_of(60, 3), stateful_step_count=60
    )
    run_state_machine_as_test(Rules, settings=budget)
    assert not [event for event in (*WEIGHTS, "hits", "copies") if not total[event]]


@pytest.mark.parametrize("digest", [None, four_bits], ids=["xxh3", "4bit"])
@pytest.mark.parametrize("name", GROUPS)
def test_random_operations_agree_with_the_model(name: str, digest: Callable[[bytes], int] | None) -> None:
    machine = KVCacheMachine(GROUPS[name], digest=digest)
    machine.run(seed=20260801, operations=part_of(20_000, SHARE), check_every=6)
    machine.drain(0, 0)
    wanted = [*WEIGHTS, "hits", "certain hits", "salted hits", "copies", "refused"]
    wanted += (
        ["released", "fork refused"]
        if any(group.sliding_window or group.recent_blocks for group in GROUPS[name])
        else []
    )
    wanted += ["sealed again"] if name in ("recent", "first") else []
    rare = {event: machine.counts[event] for event in wanted if machine.counts[event] < part_of(20, SHARE)}
    assert not rare
