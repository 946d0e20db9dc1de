"""Draws random cases: how many times as fast as the better peer each is, by kind, with the geometric means.

python -m bench.plot_random OUT.svg bench/results/h200/random_seeds.json

Cases over formats that no peer reads stand beside the same ones over 16 bit, hollow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from .plot_formats import LOOK
from .ratios import BEHIND, JUDGED, TRITON_AUTO, geometric_mean
from .result_file import PALETTE

KINDS = ("decode", "speculative", "append", "prefill", "mixed")
_NAMED = 0.9  # a case below it has its name beside it
_SPREAD = 0.6  # of a kind's line, that its points are spread over


class Point(NamedTuple):
    """A case; peer: whether `ratio` is to the better peer, not to the same case over 16 bit."""

    kind: str
    case: str
    ratio: float
    peer: bool


def points_of(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Of all cases that were timed beside another, in the rows' order."""
    found = []
    for row in rows:
        if row["backend"] == JUDGED and row["ratios"]:
            peer = row["ratio"] is not None
            found.append(Point(row["suite"], row["case"], row["ratio"] if peer else row["ratios"][TRITON_AUTO], peer))
    return found


def figure_of(points: Iterable[Point]) -> Figure:
    """A line for each kind, its cases from the slowest to the fastest, a stroke at the mean of those beside peers."""
    points = list(points)
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in points)]
    figure = Figure(figsize=(6.4, 1.2 + 0.75 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(BEHIND, color="black", linewidth=0.6, linestyle=":")
    for at, kind in enumerate(kinds):
        mine = sorted((one for one in points if one.kind == kind), key=lambda one: one.ratio)
        for nth, one in enumerate(mine):
            y = at + _SPREAD * ((nth + 0.5) / len(mine) - 0.5)
            face = PALETTE[0] if one.peer else "none"
            axes.plot([one.ratio], [y], "o", color=PALETTE[0], markerfacecolor=face, markersize=4)
            if one.peer and one.ratio < _NAMED:
                axes.annotate(
                    one.case, (one.ratio, y), xytext=(-4, 3), ha="right", textcoords="offset points", fontsize=6
                )
        if ratios := [one.ratio for one in mine if one.peer]:
            mean = geometric_mean(ratios)
            axes.plot([mean, mean], [at - 0.4, at + 0.4], color=PALETTE[1], linewidth=1.5)
            axes.annotate(f"{mean:.2f}", (mean, at + 0.4), xytext=(3, 0), textcoords="offset points", color=PALETTE[1])
    ticks = [0.3, 0.4, 0.5, 0.7, 1, 1.4, 2]
    beside = "the better of FlashAttention-3 and FlashInfer, or, hollow, as over 16 bit"
    axes.set(xscale="log", xlabel=f"times as fast as {beside}")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(-0.6, len(kinds) - 0.3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    content = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    meta, points = content["meta"], points_of(content["rows"])
    with rc_context(LOOK):
        figure = figure_of(points)
        drawn = f"seeds of {meta['seeds_of'][:7]}" if "seeds_of" in meta else f"seeds {meta['seeds']}"
        title = f"{len(points)} random cases on {meta['gpu']}, {drawn}"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        figure.savefig(Path(sys.argv[1]), metadata={"Date": None})


if __name__ == "__main__":
    main()
