"""Draws result files: `python -m bench.plot RESULT.json... --out DIR` writes PNG and SVG of each picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from matplotlib.layout_engine import ConstrainedLayoutEngine  # pyright: ignore[reportMissingImports]
from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]
from matplotlib.transforms import blended_transform_factory  # pyright: ignore[reportMissingImports]

from .curves import grid, panels
from .plot_curves import ceiling_lines, draw_ceiling, ratio_figure, sweep_figure
from .result_file import (
    FAMILIES,
    SWEEP,
    Family,
    Group,
    Result,
    base,
    colours,
    groups,
    host_table,
    load,
    series,
    short,
    time_text,
    title,
)

_LOOK: Any = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "pagedattn", "figure.titlesize": 10}
_HATCHES = ("", "////", "....", "xxxx")
# Inches: a column of bars with its labels, an entry of the legend, a bar; then columns of the table.
_COLUMN, _LEGEND_COLUMN, _BAR, _TABLE_COLUMNS = 4.2, 2.2, 0.15, (0.0, 2.2, 4.2)
_GAP = 0.7  # between groups, in bars
_MOST_COLUMNS = 3


def draw_all(result: Result, folder: Path) -> list[Path]:
    """Every picture that the rows allow: bars by suite, curves of the sweep, the heat map of ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for family in FAMILIES for path in draw(result, family, folder)]
    with rc_context(_LOOK):
        if found := panels(result.rows):
            head, note = title(result.meta, SWEEP, result.rows)
            figure = sweep_figure(found, result)
            paths += _save(figure, folder / SWEEP, head, note)
        if (ratios := grid(result.rows)).cases:
            rated = [row for row in result.rows if row.get("ratio") is not None]
            head, note = title(result.meta, "ratios", [{**row, "suite": "ratios"} for row in rated])
            paths += _save(ratio_figure(ratios), folder / "ratios", head, note)
    return paths


def _save(figure: Any, path: Path, head: str, note: str) -> list[Path]:
    figure.suptitle(head, x=0.01, ha="left", weight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=6.5, color="#444444")
    paths = [path.with_suffix(f".{kind}") for kind in ("png", "svg")]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def draw(result: Result, family: Family, folder: Path) -> list[Path]:
    """Write `<suite>.png` and `<suite>.svg` into `folder`; nothing, where the family has no rows."""
    drawn = groups(result.rows, family)
    if not drawn:
        return []
    table = host_table(result.rows) if family.suite == "decode" else []
    with rc_context(_LOOK):
        figure = bar_figure(drawn, family, result, table)
        return _save(figure, folder / family.suite, *title(result.meta, family.suite, result.rows))


def bar_figure(
    drawn: Sequence[Group], family: Family, result: Result, table: Sequence[tuple[str, str, str]] = ()
) -> Figure:
    """The legend, the bars in columns side by side, and below them the table of times on the host."""
    columns = _columns(drawn)
    names = series({"backend": name} for group in drawn for name, _, _ in group.bars)
    handles = [Patch(**look, linewidth=0, label=name) for name, look in _looks(names).items()]
    handles += ceiling_lines(family.ceilings, result)
    width = max(6.8, _COLUMN * len(columns))
    per_line = int(width / _LEGEND_COLUMN)
    bars = max(sum(len(group.bars) for group in column) + _GAP * len(column) for column in columns)
    heights = [0.2 * -(-len(handles) // per_line), 0.3 + _BAR * bars, *([_BAR * (len(table) + 2)] if table else [])]
    figure = Figure(figsize=(width, sum(heights) + 1.2), layout=ConstrainedLayoutEngine(w_pad=0.1))
    grid = figure.add_gridspec(len(heights), len(columns), height_ratios=heights)
    above = figure.add_subplot(grid[0, :])
    above.set_axis_off()
    # From the figure's left edge on: the axes begin right of the bars' labels.
    place = blended_transform_factory(figure.transFigure, above.transAxes)
    legend = above.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.01, 1),
        bbox_transform=place,
        ncols=per_line,
        frameon=False,
        borderaxespad=0,
    )
    legend.set_in_layout(False)
    highest = _highest(drawn, family, result)
    for at, column in enumerate(columns):
        axes = figure.add_subplot(grid[1, at])
        _draw_bars(axes, column, _looks(names))
        axes.set(xlim=(0, highest), ylim=(bars - _GAP - 0.4, -0.6), xlabel=family.unit)
        for ceiling in family.ceilings:
            draw_ceiling(axes.axvline, ceiling, result)
    if table:
        _draw_table(figure.add_subplot(grid[2, :]), table, width)
    return figure


def _columns(drawn: Sequence[Group]) -> list[list[Group]]:
    """The groups in order, in as many columns of nearly the same number of bars as make the picture wide, not tall."""
    total = sum(len(group.bars) for group in drawn)
    count = min(len(drawn), _MOST_COLUMNS, max(1, round((total / 22) ** 0.5 + 0.4)))
    out: list[list[Group]] = [[] for _ in range(count)]
    before = 0
    for group in drawn:
        out[count * before // total].append(group)
        before += len(group.bars)
    return [column for column in out if column]


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Bars of one backend, of other versions or files, have its colour, hatched."""
    colour = colours(names)
    return {
        name: {
            "facecolor": colour[name],
            "hatch": _HATCHES[sum(base(one) == base(name) for one in names[:i]) % len(_HATCHES)],
            "edgecolor": "white",
        }
        for i, name in enumerate(names)
    }


def _highest(drawn: Sequence[Group], family: Family, result: Result) -> float:
    """The end of the axis: a little past all bars and ceilings."""
    values = [value for group in drawn for _, value, _ in group.bars]
    return 1.02 * max(*values, *(result.meta.get(ceiling) or 0.0 for ceiling in family.ceilings))


def _draw_bars(axes: Any, drawn: Sequence[Group], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Bars downwards, their values in a column right of the axes, where no ceiling's line runs through them."""
    y, ticks = 0.0, []
    for group in drawn:
        ticks.append(y + (len(group.bars) - 1) / 2)
        for name, value, us in group.bars:
            axes.barh(y, value, height=0.84, **looks[name], linewidth=0)
            note = f"{short(value)}  ({time_text(us)})"
            axes.annotate(note, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=6.5)
            y += 1
        y += _GAP
    axes.set_yticks(ticks, [group.label for group in drawn])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_table(axes: Any, table: Sequence[tuple[str, str, str]], width: float) -> None:
    header = ("decode: median (low to high)", "host µs per layer call", "plan µs per step")
    axes.set_axis_off()
    axes.set(ylim=(len(table) + 0.5, -0.5), xlim=(0, width))
    for y, row in enumerate((header, *table)):
        for x, text in zip(_TABLE_COLUMNS, row, strict=True):
            axes.text(x, y, text, va="center", weight="normal" if y else "bold", fontsize=7)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        result = load(args.results)
    except ValueError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    print(*draw_all(result, args.out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
