"""How much faster than the other libraries, per row and over a table: the best peer's time over one's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
# What the summary averages apart: memory bounds the one, arithmetic the other.
PHASES = {
    "decode": ("decode",),
    "prefill+mixed": ("prefill", "mixed"),
    "append+speculative": ("append", "speculative"),
    "mla": ("mla",),
}
BEHIND = 0.95  # a ratio below which a row is behind its peer, however much measurements vary
FAR_BEHIND = 0.9  # one that no row may be below
_WORST = 3  # rows that are named of each kind
JUDGED = "TRITON"  # whose ratios say how this library does: our kernels, called through our layer
TRITON_AUTO = "TRITON auto"  # over a cache in the model's dtype, beside the same rows in a format


def label(row: Row) -> str:
    """Whose row it is: `TRITON`, over caches of a format `TRITON (int8)`."""
    form = row.get("kv_cache_dtype")
    return f"{row['backend']} ({form})" if form else row["backend"]


def library(name: str) -> str:
    """`FlashInfer` of `FlashInfer (persistent)`: the better of a library's ways is what counts."""
    return name.partition(" (")[0]


def add_ratios(rows: Sequence[Row], peers: Iterable[str]) -> None:
    """Give the rows of one case `ratios`, the best time of each peer library, and of TRITON_AUTO, over the row's; and
    `ratio`, that to the best peer.

    Rows without a time, and those that are compared with, get none.
    """
    others, best = {*peers, TRITON_AUTO}, {}
    for row in rows:
        if row["backend"] in others and row["us"] is not None:
            name = library(row["backend"])
            best[name] = min(row["us"], best.get(name, math.inf))
    for row in rows:
        if best and row["backend"] not in others and row["us"] is not None:
            ratios = row["ratios"] = {name: round(us / row["us"], 4) for name, us in best.items()}
            row["ratio"] = min((ratios[name] for name in ratios if name != TRITON_AUTO), default=None)


def judged_ratio(rows: Iterable[Row]) -> float | None:
    """Of the rows of one case that of `JUDGED`; None where it was not timed or no peer was."""
    return next((row["ratio"] for row in rows if row["backend"] == JUDGED), None)


def summarise(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Per contender and format: the geometric mean of `ratio` in each phase, over how many rows, how many of all are
    `BEHIND`, and the worst row."""
    out: dict[str, dict[str, Any]] = {}
    counted = {suite for suites in PHASES.values() for suite in suites}
    kept = [row for row in rows if row.get("ratio") is not None and row["suite"] in counted]
    for name in dict.fromkeys(map(label, kept)):
        mine = [row for row in kept if label(row) == name]
        facts: dict[str, Any] = {}
        for phase, suites in PHASES.items():
            ratios = [row["ratio"] for row in mine if row["suite"] in suites]
            if ratios:
                facts[phase] = {"ratio": round(geometric_mean(ratios), 4), "rows": len(ratios)}
        worst = min(mine, key=lambda row: row["ratio"])
        facts["behind"] = sum(row["ratio"] < BEHIND for row in mine)
        out[name] = {**facts, "worst": {"case": worst["case"], "ratio": worst["ratio"]}}
    return out


def judge(rows: Iterable[Row]) -> dict[str, Any]:
    """Of `JUDGED` over caches of all formats: rows with a ratio and cases without a peer, how many and what share of
    the former are below `BEHIND` and `FAR_BEHIND`; the same of each kind with its geometric mean and worst rows.
    """
    mine = [row for row in rows if row["backend"] == JUDGED]
    rated = [row for row in mine if row.get("ratio") is not None]
    kinds = {}
    for suite in dict.fromkeys(row["suite"] for row in rated):
        some = sorted((row for row in rated if row["suite"] == suite), key=lambda row: row["ratio"])
        mean = round(geometric_mean([row["ratio"] for row in some]), 4)
        worst = [{name: row[name] for name in ("case", "ratio", "draw") if name in row} for row in some[:_WORST]]
        kinds[suite] = {"ratio": mean, **_below(some), "worst": worst}
    alone = sum(row.get("ratio") is None and row["us"] is not None for row in mine)
    return {**_below(rated), "without_peer": alone, "kinds": kinds}


def _below(rows: Sequence[Row]) -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": len(rows)}
    for limit in (BEHIND, FAR_BEHIND):
        count = sum(row["ratio"] < limit for row in rows)
        facts[f"below_{limit:.2f}"] = {"rows": count, "share": round(count / max(len(rows), 1), 4)}
    return facts


def beside_auto(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Per contender and format: the geometric mean of TRITON_AUTO's time over the row's in each suite, over how many
    rows, how many of all are slower than that, and the worst row."""
    out: dict[str, dict[str, Any]] = {}
    kept = [row for row in rows if TRITON_AUTO in (row.get("ratios") or {})]
    for name in dict.fromkeys(map(label, kept)):
        mine = [(row["ratios"][TRITON_AUTO], row) for row in kept if label(row) == name]
        facts: dict[str, Any] = {}
        for suite in dict.fromkeys(row["suite"] for _, row in mine):
            ratios = [ratio for ratio, row in mine if row["suite"] == suite]
            facts[suite] = {"ratio": round(geometric_mean(ratios), 4), "rows": len(ratios)}
        least, worst = min(mine, key=lambda one: one[0])
        facts["slower"] = sum(ratio < 1 for ratio, _ in mine)
        out[name] = {**facts, "worst": {"case": worst["case"], "ratio": least}}
    return out


def break_evens(rows: Iterable[Row]) -> dict[str, int | None]:
    """By backend, heads and keys of a latent layer, the fewest measured new tokens from which on, in all larger cases
    too, its expanded form takes less time than its absorbed one; None where it does not."""
    times: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.get("new_tokens") and row["us"] is not None:
            name, _, form = row["backend"].partition(" (")
            group = times.setdefault(f"{name}, {row['num_heads']} heads, {row['keys']} keys", {})
            group.setdefault(row["new_tokens"], {})[form.rstrip(")")] = row["us"]
    both = {name: {n: one for n, one in group.items() if len(one) == 2} for name, group in times.items()}
    return {name: _break_even(group) for name, group in both.items() if group}


def _break_even(group: dict[int, dict[str, float]]) -> int | None:
    found = None
    for tokens in sorted(group, reverse=True):
        if group[tokens]["expanded"] >= group[tokens]["absorbed"]:
            break
        found = tokens
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))
