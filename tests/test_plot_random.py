"""The picture of random cases: points beside peers and beside 16 bit, and means of the former."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from pagedattn.bench import plot_random
from pagedattn.bench.plot_random import Point


def row(suite: str, case: str, backend: str = "TRITON", **of: Any) -> dict[str, Any]:
    return {"suite": suite, "case": case, "backend": backend, "ratio": None, "ratios": None, **of}


ROWS = [
    row("decode", "a", ratio=0.5, ratios={"FA3": 0.5, "FlashInfer": 2.0}),
    row("decode", "a", "FA3"),
    row("decode", "b", ratio=2.0, ratios={"FA3": 2.0, "TRITON auto": 0.7}),
    row("mixed", "c", ratios={"TRITON auto": 0.7}),
    row("mixed", "without a peer, over 16 bit"),
]
POINTS = [Point("decode", "a", 0.5, True), Point("decode", "b", 2.0, True), Point("mixed", "c", 0.7, False)]


def test_a_case_stands_beside_its_peer_or_beside_16_bit() -> None:
    assert plot_random.points_of(ROWS) == POINTS


def test_a_kind_is_a_line_with_the_mean_of_those_beside_peers() -> None:
    axes = plot_random.figure_of(POINTS).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["decode", "mixed"]
    assert [text.get_text() for text in axes.texts] == ["a", "1.00"], "the slowest by name, and one mean"
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in dots] == [0.5, 2.0, 0.7]
    assert [line.get_markerfacecolor() == "none" for line in dots] == [False, False, True]
