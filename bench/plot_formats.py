"""Draws what cache formats cost and bring: decodes by the bytes they read, or a model's loss by position.

python -m bench.plot_formats bench/results/h200/decode_codes.json OUT.svg
python -m bench.plot_formats bench/results/cpu/accuracy.json [accuracy_int4.json ...] OUT.svg

Of several files the first one's rows are drawn, and of the others those of the same documents in formats that no file
before them has; how many documents a format read is said where they are fewer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from pagedattn.formats.registry import FORMATS, format_of

from .ratios import TRITON_AUTO, Row
from .result_file import PALETTE

LOOK: Any = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "pagedattn", "figure.titlesize": 10}
_FA3 = "FA3, fp8_e4m3 queries"
_COLOURS = {"auto": "#777777", "fp8_e4m3": PALETTE[4], "fp8_e5m2": PALETTE[3], "int8": PALETTE[0], "k8v4": PALETTE[2]}
_COLOURS |= {"int4": PALETTE[7], "turboquant4": PALETTE[5], _FA3: PALETTE[1]}
_COLOURS |= {"turboquant4:window=64": PALETTE[9], "turboquant3": PALETTE[10], "turboquant3:window=64": PALETTE[8]}

Points = list[tuple[float, float]]


class Loss(NamedTuple):
    """Of positions below `end`, the mean over documents, each position counting as much; error: of delta_nll."""

    end: int
    kl: float
    delta_nll: float
    error: float
    top1: float


def decode_points(rows: Sequence[Row]) -> dict[str, Points]:
    """Bytes that a decode reads and its microseconds, of TRITON by format and of FA3 over fp8, by bytes."""
    found: dict[str, Points] = {}
    with_each_format = {"FA3": _FA3}
    if all("kv_cache_dtype" in row for row in rows):  # else 16 bit has rows of its own
        with_each_format[TRITON_AUTO] = "auto"
    for row in rows:
        form = row.get("kv_cache_dtype", "auto")
        beside = with_each_format if form == "fp8_e4m3" else {}
        name = {"TRITON": form, **beside}.get(str(row.get("backend")))
        if name is not None and row["suite"] == "decode" and row["us"] is not None:
            found.setdefault(name, []).append((row["gb_s"] * row["us"] * 1e3, row["us"]))
    return {name: sorted(found[name]) for name in (*FORMATS, _FA3) if name in found}


def loss_curves(rows: Sequence[Row]) -> dict[str, list[Loss]]:
    """What each format loses in each range of positions, ranges in order."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if "positions_below" in row:
            name = format_of(row["kv_cache_dtype"]).name
            found.setdefault(name, {}).setdefault(row["positions_below"], []).append(row)
    names = [*FORMATS, *sorted(found.keys() - FORMATS.keys())]  # those with a window behind the others
    return {name: [_mean(end, some) for end, some in sorted(found[name].items())] for name in names if name in found}


def together(contents: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of the first file; of each other one those of its documents, in formats that none before it has."""
    rows: list[Row] = [*contents[0]["rows"]]
    documents = {row.get("document") for row in rows}
    for content in contents[1:]:
        known = {row["kv_cache_dtype"] for row in rows}
        of_these = [row for row in content["rows"] if row["document"] in documents]
        rows += [row for row in of_these if row["kv_cache_dtype"] not in known]
    return rows


def _mean(end: int, rows: Sequence[Row]) -> Loss:
    total = sum(row["positions"] for row in rows)
    kl, delta, top1 = (
        sum(row[name] * row["positions"] for row in rows) / total for name in ("kl", "delta_nll", "top1")
    )
    error = math.hypot(*(row["delta_nll_error"] * row["positions"] for row in rows)) / total
    return Loss(end, kl, delta, error, top1)


def decode_figure(points: Mapping[str, Points], read_gb_s: float) -> Figure:
    """Times by bytes beside the time that reading them takes at least; then what part of its time that is."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    times, parts = figure.subplots(1, 2)
    ends = [end for some in points.values() for end in (some[0][0], some[-1][0])]
    floor = [(size, size / read_gb_s / 1e3) for size in (min(ends), max(ends))]
    times.plot(
        *zip(*_mega(floor), strict=True), "-", color="black", linewidth=0.8, label=f"read at {read_gb_s:.0f} GB/s"
    )
    for name, some in points.items():
        look = {"color": _COLOURS[name], "marker": "x" if name == _FA3 else ".", "linestyle": "none", "label": name}
        times.plot(*zip(*_mega(some), strict=True), **look)
        parts.plot(*zip(*[(size / 1e6, 100 * size / read_gb_s / 1e3 / us) for size, us in some], strict=True), **look)
    times.set(xscale="log", yscale="log", xlabel="MB read by a layer's decode", ylabel="µs")
    parts.set(xscale="log", xlabel="MB read by a layer's decode", ylabel="% of that bandwidth", ylim=(0, None))
    times.legend(frameon=False)
    return figure


def _mega(points: Points) -> Points:
    return [(size / 1e6, us) for size, us in points]


def loss_figure(curves: Mapping[str, Sequence[Loss]], labels: Mapping[str, str]) -> Figure:
    """KL, loss with its standard error, and agreement, by position."""
    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    kl, delta, top1 = figure.subplots(1, 3)
    for name, losses in curves.items():
        look = {"color": _COLOURS[name], "marker": ".", "label": labels[name]}
        ends = [loss.end for loss in losses]
        kl.plot(ends, [loss.kl for loss in losses], **look)
        delta.errorbar(ends, [loss.delta_nll for loss in losses], [loss.error for loss in losses], capsize=2, **look)
        top1.plot(ends, [100 * loss.top1 for loss in losses], **look)
    kl.set(yscale="log", ylabel="KL divergence from the exact cache's")
    delta.set(ylabel="loss per token beyond the exact cache's")
    top1.set(ylabel="% with the same first choice", ylim=(None, 100))
    ends = sorted({loss.end for losses in curves.values() for loss in losses})
    for axes in (kl, delta, top1):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [str(end) for end in ends], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("positions up to")
    figure.legend(*kl.get_legend_handles_labels(), frameon=False, loc="outside right center")
    return figure


def _labels(rows: Sequence[Row]) -> dict[str, str]:
    """How the legend names each format that has a colour, with the number of its documents where that is less."""
    read: dict[str, set[str]] = {}
    for row in rows:
        read.setdefault(format_of(row["kv_cache_dtype"]).name, set()).add(row["document"])
    most = max(map(len, read.values()))
    few = {name: f" ({len(some)} document{'s' if len(some) > 1 else ''})" for name, some in read.items()}
    return {name: name + (few[name] if len(read[name]) < most else "") for name in read if name in _COLOURS}


def draw(contents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The picture of result files, of decodes one, SVG or PNG.

    Raises:
        ValueError: rows of neither decodes nor accuracy.
    """
    meta, rows = contents[0]["meta"], together(contents)
    with rc_context(LOOK):
        if points := decode_points(rows):
            figure, what = decode_figure(points, meta["read_gb_s"]), f"decode on {meta['gpu']}"
        elif curves := loss_curves(rows):
            labels, chunks = _labels(rows), " or ".join(map(str, sorted({row["chunk"] for row in rows})))
            figure = loss_figure({name: losses for name, losses in curves.items() if name in labels}, labels)
            what = f"{meta['model']}, {meta['dtype']}, chunks of {chunks} tokens"
        else:
            raise ValueError(
                f"rows must be of decodes or accuracy, got suites {sorted({row['suite'] for row in rows})}"
            )
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(what, x=0.01, ha="left", weight="bold")
        notes = [f"commit {x['meta']['commit'].partition(';')[0]}, {x['meta']['date']}" for x in contents]
        note = f"torch {meta['torch']}, {'; '.join(notes)}"
        figure.supxlabel(note, x=0.01, ha="left", fontsize=6.5, color="#444444")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    *files, out = map(Path, sys.argv[1:])
    draw([json.loads(file.read_text(encoding="utf-8")) for file in files], out)


if __name__ == "__main__":
    main()
