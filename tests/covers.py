"""Which cases of a test the default run takes: few that hold every value of its parameters, or more than values.

`@pytest.mark.cover(by=facets)` leaves to --grid the cases that add no facet. `facets` is given a case's parameters by
name: `values`, `pairs`, `beside(name)`, or a function of the test's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Facets = Callable[..., Iterable[Hashable]]


def cover(facets: Sequence[Iterable[Hashable]]) -> list[int]:
    """Indices of few cases that have every facet that any case has, by greedy choice; the first of those that add most.

    Args:
        facets: of each case.
    """
    bits: defaultdict[Hashable, int] = defaultdict(lambda: 1 << len(bits))  # of each facet, in the order they are met
    held = [sum(bits[facet] for facet in dict.fromkeys(of_one)) for of_one in facets]
    missing = (1 << len(bits)) - 1
    chosen: list[int] = []
    while missing:
        best = max(range(len(held)), key=lambda index: (held[index] & missing).bit_count())
        chosen.append(best)
        missing &= ~held[best]
    return chosen


def values(**point: Any) -> list[Hashable]:
    """Where parameters do not interact: each value of each."""
    return [(name, value if isinstance(value, Hashable) else repr(value)) for name, value in point.items()]


def pairs(**point: Any) -> list[Hashable]:
    """Where any two parameters may interact: each pair of their values."""
    return [*combinations(values(**point), 2)]


def beside(*names: str) -> Facets:
    """Where these parameters choose the path of all others: each value beside each of theirs."""

    def facets(**point: Any) -> list[Hashable]:
        of_path = tuple(point.pop(name) for name in names)
        return [(of_path, one) for one in values(**point)]

    return facets


def left_to_grid(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What the `cover` marks of tests leave out of all of their cases that were collected."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cover") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for of_one in cases.values():
        taken = {*cover([[None, *_facets(item)] for item in of_one])}  # where nothing has a facet, one case is run
        left |= {item for index, item in enumerate(of_one) if index not in taken}
    return left


def _facets(item: pytest.Function) -> Iterable[Hashable]:
    marker = item.get_closest_marker("cover")
    assert marker is not None, item.nodeid
    return marker.kwargs["by"](**item.callspec.params)
