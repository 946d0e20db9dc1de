"""Which releases of a library are served: order of versions, both ends, and what pip is told to install."""

from __future__ import annotations

import pytest

from pagedattn.backends.releases import Releases, precedence


def test_versions_sort_as_their_numbers_do() -> None:
    ordered = "0.6.9 0.6.13 0.6.18.post1 0.7 0.7.2.post1 4.0.0a9 4.0.0b9 4.0.0b36 4.0.0rc1 4.0".split()
    assert sorted(ordered[::-1], key=precedence) == ordered
    assert precedence("2.8.3.post2") == precedence("2.8.3+cu13torch2") == precedence("2.8.3")
    assert precedence("3.0.0.b1") == precedence("3.0.0b1") < precedence("3.0.0")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("1.9.9", "lib 1.9.9 is older than 2.0.1b2"),
        ("2.0.1b1", "older"),
        ("2.0.1b2", ""),
        ("2.3.0", ""),
        ("2.3.77", ""),
        ("2.4.0b1", "lib 2.4.0b1 is of a newer series than 2.3.1, the newest tried"),
        ("3.0", "newer series"),
        ("no number", "older"),
    ],
)
def test_both_ends(found: str, reason: str) -> None:
    releases = Releases("lib", oldest="2.0.1b2", newest="2.3.1")
    assert reason in releases.refusal(found) and bool(reason) == bool(releases.refusal(found))
    assert (str(releases), releases.requirement) == ("2.0.1b2 to 2.3.1", "lib>=2.0.1b2,<2.4")
