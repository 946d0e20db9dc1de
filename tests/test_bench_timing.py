"""Contenders take turns, and nobody has the same neighbour always."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations
from typing import NamedTuple

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


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_as_many_calls_as_a_replay_has_are_one_replay(calls: int) -> None:
    replayed: list[int] = []
    turn = timing.in_turns(lambda: replayed.append(len(made)), calls)
    made: list[None] = []
    for _ in range(3 * calls):
        turn()
        made.append(None)
    assert replayed == [0, calls, 2 * calls]


class Event(NamedTuple):
    """As torch.cuda.Event, at a number of milliseconds."""

    ms: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


def test_what_an_instant_enqueues_itself_is_not_counted() -> None:
    first, second = (timing.Instant(*map(Event, ms)) for ms in ((1.0, 3.0), (10.0, 14.0)))  # type: ignore[arg-type]
    assert second - first == pytest.approx(7e-3)
