"""Draws result files: `python -m bench.plot RESULT.json... --out DIR` writes PNG and SVG of each picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from matplotlib.lines import Line2D  # pyright: ignore[reportMissingImports]
from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]

from .curves import grid, panels
from .plot_curves import ceiling_note, ratio_figure, sweep_figure
from .result_file import (
    CEILINGS,
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


def draw_all(result: Result, folder: Path) -> list[Path]:
    """Every picture that the rows allow: bars by suite, curves of the sweep, the heat map of ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for family in FAMILIES for path in draw(result, family, folder)]
    with rc_context(_LOOK):
        if found := panels(result.rows):
            head, note = title(result.meta, SWEEP, result.rows)
            figure = sweep_figure(found, result)
            paths += _save(figure, folder / SWEEP, head, "\n".join(filter(None, (note, ceiling_note(result)))))
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
    bars = sum(len(group.bars) for group in drawn)
    table = host_table(result.rows) if family.suite == "decode" else []
    heights = [0.8 + 0.17 * bars + 0.12 * len(drawn), 0.25 + 0.17 * (len(table) + 1)][: 2 if table else 1]
    with rc_context(_LOOK):
        figure = Figure(figsize=(6.8, sum(heights) + 0.7), layout="constrained")
        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
        _draw_bars(axes[0], drawn, family, result)
        if table:
            _draw_table(axes[1], table)
        return _save(figure, folder / family.suite, *title(result.meta, family.suite, result.rows))


def _draw_bars(axes: Any, drawn: Sequence[Group], family: Family, result: Result) -> None:
    names = series({"backend": name} for group in drawn for name, _, _ in group.bars)
    colour = colours(names)
    # Bars of the same backend, of another version or another file, have its colour, hatched.
    hatch = {name: _HATCHES[sum(base(one) == base(name) for one in names[:i]) % 4] for i, name in enumerate(names)}
    look: dict[str, dict[str, Any]] = {
        name: {"facecolor": colour[name], "hatch": hatch[name], "edgecolor": "white"} for name in names
    }
    y, ticks = 0.0, []
    for group in drawn:
        ticks.append(y + (len(group.bars) - 1) / 2)
        for name, value, us in group.bars:
            axes.barh(y, value, height=0.84, **look[name], linewidth=0)
            note = f"{short(value)}  ({time_text(us)})"
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # a ceiling's line must not cross digits
            axes.annotate(note, (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7, bbox=behind)
            y += 1
        y += 0.7
    legend: list[Any] = [Patch(**look[name], linewidth=0, label=name) for name in names]
    highest = max(value for group in drawn for _, value, _ in group.bars)
    for ceiling in family.ceilings:
        limit = result.meta.get(ceiling)
        if limit:
            text, style = CEILINGS[ceiling]
            axes.axvline(limit, color="black", linestyle=style, linewidth=0.8, zorder=0)
            legend.append(Line2D([], [], color="black", linestyle=style, linewidth=0.8, label=f"{text} {short(limit)}"))
            highest = max(highest, limit)
    axes.set(xlim=(0, highest * 1.2), ylim=(y - 1.1, -0.7), xlabel=family.unit)
    axes.set_yticks(ticks, [group.label for group in drawn])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(handles=legend, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)


def _draw_table(axes: Any, table: Sequence[tuple[str, str, str]]) -> None:
    header = ("median (low to high)", "host µs per layer call", "plan µs per step")
    axes.set_axis_off()
    axes.set(ylim=(len(table) + 0.5, -0.5), xlim=(0, 1))
    for y, row in enumerate((header, *table)):
        for x, text in zip((0.0, 0.25, 0.6), row, strict=True):
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
