"""How much random work the tests do: all of it under --grid (make test-all), else a part with the same events in it."""

from __future__ import annotations

everything = False  # conftest.py sets it before tests are imported


def part_of(count: int, share: int) -> int:
    """`count` under --grid, else count / share."""
    return count if everything else count // share


def option() -> list[str]:
    """How a script of the tests is told."""
    return ["--grid"] if everything else []
