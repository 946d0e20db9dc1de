"""Draws the sweep's curves and the heat map of ratios onto figures; `plot.py` saves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from matplotlib.lines import Line2D  # pyright: ignore[reportMissingImports]

from .curves import Grid, Panel
from .result_file import CEILINGS, LineStyle, Result, base, colours, series, short

_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
_UNITS = {"gb_s": ("GB/s", "copy_gb_s"), "tflops": ("TFLOP/s", "matmul_tflops")}
_COLUMNS = 3
_CEILING: dict[str, Any] = {"color": "black", "linewidth": 0.8}


def sweep_figure(panels: list[Panel], result: Result) -> Figure:
    """Small multiples: the same colour and line for a contender in each, the ceiling as a black line."""
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(9.6, 2.6 * lines + 1.2), layout="constrained")
    axes = figure.subplots(lines + 1, _COLUMNS, squeeze=False, height_ratios=[*[1] * lines, 0.16]).flat
    names = series({"backend": name} for panel in panels for name in panel.curves)
    colour = colours(names)
    style: dict[str, LineStyle] = {
        name: _STYLES[sum(base(one) == base(name) for one in names[:i]) % 4] for i, name in enumerate(names)
    }
    for panel, one in zip(panels, axes, strict=False):
        for name, curve in panel.curves.items():
            one.plot(*zip(*curve, strict=True), color=colour[name], linestyle=style[name], marker=".", linewidth=1.2)
        _dress(one, panel, result)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    legend = [Line2D([], [], color=colour[name], linestyle=style[name], marker=".", label=name) for name in names]
    legend += ceiling_lines(list(dict.fromkeys(_UNITS[panel.value][1] for panel in panels)), result)
    below = axes[lines * _COLUMNS].legend(handles=legend, loc="upper left", ncols=4, frameon=False, borderaxespad=0)
    below.set_in_layout(False)  # it is wider than the column that it begins in
    return figure


def _dress(axes: Any, panel: Panel, result: Result) -> None:
    unit, ceiling = _UNITS[panel.value]
    lengths = sorted({length for curve in panel.curves.values() for length, _ in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], minor=False)
    axes.minorticks_off()
    axes.set(title=panel.title, ylabel=unit, xlabel="keys per sequence")
    draw_ceiling(axes.axhline, ceiling, result)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def ratio_figure(grid: Grid) -> Figure:
    """Purple is faster than the best peer, orange slower; the number is the peer's time over the contender's."""
    figure = Figure(figsize=(4.2 + 1.1 * len(grid.contenders), 1.4 + 0.24 * len(grid.cases)), layout="constrained")
    axes = figure.subplots()
    values = [[float("nan") if ratio is None else ratio for ratio in line] for line in grid.ratios]
    # Orange and purple, with white at a tie, differ under every kind of colour blindness.
    image = axes.imshow(values, cmap="PuOr", vmin=0.5, vmax=1.5, aspect="auto")
    for y, line in enumerate(grid.ratios):
        for x, ratio in enumerate(line):
            dark = ratio is not None and abs(ratio - 1) > 0.35
            text = "-" if ratio is None else f"{ratio:.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(grid.contenders)), grid.contenders, rotation=20, ha="right")
    axes.set_yticks(range(len(grid.cases)), grid.cases)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, extend="both", label="best peer's time / own (above 1: faster)", shrink=0.6)
    return figure


def ceiling_lines(names: Sequence[str], result: Result) -> list[Line2D]:
    """Entries of a legend, for the ceilings of these names that were measured."""
    found = [(*CEILINGS[name], result.meta[name]) for name in names if result.meta.get(name)]
    return [
        Line2D([], [], **_CEILING, linestyle=style, label=f"ceiling: {text} {short(limit)} {unit}")
        for text, unit, style, limit in found
    ]


def draw_ceiling(line: Callable[..., object], name: str, result: Result) -> None:
    """By `axhline` or `axvline`, where it was measured."""
    if limit := result.meta.get(name):
        line(limit, **_CEILING, linestyle=CEILINGS[name][2], zorder=0)
