"""Contenders take turns, and nobody has the same neighbour always."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations

import pytest

from pagedattn.bench import timing


def test_replays_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replays = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    monkeypatch.setattr(timing, "elapsed_us", lambda some, flush: [(one(), 1e4)[1] for one in some])
    assert timing.time_replays(replays, {"a": 1, "b": 2, "c": 4}) == {"a": 1e4, "b": 5e3, "c": 2.5e3}
    rounds = ["".join(calls[i : i + 3]) for i in range(6, len(calls), 3)]
    assert len(rounds) == math.floor(timing._SECONDS * 1e6 / 1e4) == 30
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    after = Counter(pair for one in rounds for pair in pairwise(one))
    assert {*after} == {*permutations("abc", 2)} and {*after.values()} == {10}


@pytest.mark.parametrize("n", range(1, 11))
def test_everybody_follows_everybody_equally_often(n: int) -> None:
    orders = timing._orders(n)
    assert len(orders) == n * (1 + n % 2) and all(sorted(one) == [*range(n)] for one in orders)
    after = Counter(pair for one in orders for pair in pairwise(one))
    assert {*after} == {*permutations(range(n), 2)} and len({*after.values()}) <= 1
