"""Bars of bench.vllm_compare's speeds: medians of both backends, and the rounds as points.

python -m bench.vllm_plot vllm.json OUT.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from matplotlib import rcParams  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from .ratios import Row

_COLOURS = {"CUSTOM": "#5e3c99", "FLASH_ATTN": "#e08214"}


def figure(rows: list[Row], note: str) -> Figure:
    """A panel per workload, since one request and 256 differ by a factor of forty."""
    drawn = Figure(figsize=(3.2 * len(rows), 3.2), layout="constrained")
    for row, axes in zip(rows, drawn.subplots(1, len(rows), squeeze=False).flat, strict=True):
        names = [*row["tok_s"]]
        medians = [statistics.median(row["tok_s"][name]) for name in names]
        axes.bar(names, medians, color=[_COLOURS[name] for name in names], width=0.6)
        for x, name in enumerate(names):
            axes.plot([x] * len(row["tok_s"][name]), row["tok_s"][name], ".", color="black", markersize=4)
            axes.annotate(f"{medians[x]:,.0f}", (x, 0), (0, 4), textcoords="offset points", ha="center", color="white")
        count, gpus = row["requests"], row["options"].get("tensor_parallel_size", 1)
        model = row["model"] if gpus == 1 else f"{row['model']}, {gpus} GPUs"
        model += f", {cache} cache" if (cache := row["options"].get("kv_cache_dtype")) else ""
        axes.set(title=f"{model}, {count} request{'s' if count > 1 else ''}", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    drawn.axes[0].set_ylabel("output tokens/s")
    drawn.supxlabel(note, fontsize=8)
    return drawn


def main() -> None:
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    meta = content["meta"]
    rows = [row for row in content["rows"] if "tok_s" in row]
    rcParams["svg.hashsalt"] = "pagedattn"  # the same bytes for the same figures
    drawn = figure(rows, f"vLLM {meta['vllm']}, {meta['gpu']}; points are rounds in turns")
    drawn.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
