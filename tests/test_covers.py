"""What `cover` marks leave to --grid: never a facet, never all of a test, and nothing of a test without one."""

from __future__ import annotations

import covers
import pytest

pytest_plugins = ["pytester"]
SOURCE = """
import covers
import pytest

both = pytest.mark.parametrize("b", "xyz"), pytest.mark.parametrize(("a", "c"), [(1, [1]), (2, [2]), (3, [1])])

def of(by):
    def test(a, b, c): ...

    for mark in both:
        test = mark(test)
    return pytest.mark.cover(by=by)(test) if by else test

test_values = of(covers.values)
test_pairs = of(covers.pairs)
test_beside = of(covers.beside("b"))
test_nothing = of(lambda **_: [])
test_own = of(lambda a, b, c: [a > 1])
test_unmarked = of(None)
"""


def test_few_cases_have_every_facet() -> None:
    facets = ["a", "ab", "bcd", "cd", "e", ""]
    assert covers.cover(facets) == [2, 0, 4]
    assert covers.cover([]) == []


def test_a_mark_says_what_is_left(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(SOURCE)
    left = covers.left_to_grid(items)
    kept: dict[str, list[str]] = {}
    for item in items:
        if item not in left:
            kept.setdefault(item.name.partition("[")[0], []).append(item.name.partition("[")[2].rstrip("]"))
    counts = {name.removeprefix("test_"): len(cases) for name, cases in kept.items()}
    assert counts == {"values": 3, "pairs": 9, "beside": 9, "nothing": 1, "own": 2, "unmarked": 9}
    columns = zip(*(case.split("-") for case in kept["test_values"]), strict=True)
    assert [{*column} for column in columns] == [{*"xyz"}, {*"123"}, {"c0", "c1", "c2"}]
