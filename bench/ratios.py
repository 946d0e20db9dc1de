"""How much faster than the other libraries, per row and over a table: the best peer's time over one's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
# What the summary averages apart: memory bounds the one, arithmetic the other.
PHASES = {"decode": ("decode",), "prefill+mixed": ("prefill", "mixed")}


def library(name: str) -> str:
    """`FlashInfer` of `FlashInfer (persistent)`: the better of a library's ways is what counts."""
    return name.partition(" (")[0]


def add_ratios(rows: Sequence[Row], peers: Iterable[str]) -> None:
    """Give the rows of one case `ratios`, each peer library's best time over the row's, and `ratio`, that to the best.

    Rows without a time, and the peers' own, get none.
    """
    peers, best = {*peers}, {}
    for row in rows:
        if row["backend"] in peers and row["us"] is not None:
            name = library(row["backend"])
            best[name] = min(row["us"], best.get(name, math.inf))
    for row in rows:
        if best and row["backend"] not in peers and row["us"] is not None:
            row["ratios"] = {name: round(us / row["us"], 4) for name, us in best.items()}
            row["ratio"] = min(row["ratios"].values())


def summarise(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Per contender: the geometric mean of `ratio` in each phase, over how many rows, and the worst of these rows."""
    out: dict[str, dict[str, Any]] = {}
    counted = {suite for suites in PHASES.values() for suite in suites}
    kept = [row for row in rows if row.get("ratio") is not None and row["suite"] in counted]
    for name in dict.fromkeys(row["backend"] for row in kept):
        mine = [row for row in kept if row["backend"] == name]
        facts: dict[str, Any] = {}
        for phase, suites in PHASES.items():
            ratios = [row["ratio"] for row in mine if row["suite"] in suites]
            if ratios:
                facts[phase] = {"ratio": round(geometric_mean(ratios), 4), "rows": len(ratios)}
        worst = min(mine, key=lambda row: row["ratio"])
        out[name] = {**facts, "worst": {"case": worst["case"], "ratio": worst["ratio"]}}
    return out


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))
