"""What curves and the heat map show, as data: bandwidth by context, speed by length, ratios by case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .ratios import Row, label
from .result_file import SWEEP, series
from .workload import parse

Curve = list[tuple[int, float]]  # length and value, by length


class Panel(NamedTuple):
    """One pair of axes of the sweep: a curve per contender."""

    title: str
    value: str  # gb_s or tflops
    curves: dict[str, Curve]


class Grid(NamedTuple):
    """Ratios to the best peer: a row per case, a column per contender, None where there is no time."""

    cases: list[str]
    contenders: list[str]
    ratios: list[list[float | None]]


def panels(rows: Iterable[Row]) -> list[Panel]:
    """Decodes, bandwidth by context, a panel for each batch size; then prompts, speed by length."""
    found: dict[int, list[tuple[str, int, float]]] = {}
    timed = [row for row in rows if row["suite"] == SWEEP and row.get("us") is not None]
    for row in timed:
        work = parse(row["workload"])
        batch = work.num_decodes  # 0: prompts
        found.setdefault(batch, []).append((label(row), work.seq_lens[0], row["gb_s" if batch else "tflops"]))
    out = []
    for batch in sorted(found, key=lambda batch: (batch == 0, batch)):
        names = series({"backend": name} for name, _, _ in found[batch])
        curves = {name: sorted(point[1:] for point in found[batch] if point[0] == name) for name in names}
        title = f"decode, batch {batch}" if batch else "prefill, one prompt"
        out.append(Panel(title, "gb_s" if batch else "tflops", curves))
    return out


def grid(rows: Sequence[Row]) -> Grid:
    """Every case with a ratio, in the file's order, against every contender with one."""
    kept = [row for row in rows if row.get("ratio") is not None and row["suite"] != SWEEP]
    names = series(kept)
    found: dict[str, dict[str, float]] = {}
    for row in kept:
        found.setdefault(f"{row['suite']} {row['case']}", {})[row["backend"]] = row["ratio"]
    return Grid([*found], names, [[some.get(name) for name in names] for some in found.values()])
