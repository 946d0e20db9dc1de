"""Draws all cache formats in one picture: what a model loses by the bits of an element, and how fast a decode is.

python -m bench.plot_tradeoff OUT.svg bench/results/cpu/accuracy.json bench/results/h100/formats.json ...

Files of `bench.accuracy` give the losses, those of decodes the speeds: of 64 over 4k keys, 32/8 heads of 128, beside
the 16-bit cache in the same run. The last file that has a format counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from pagedattn import PagedKVCache
from pagedattn.formats.registry import format_of

from .plot_formats import LOOK
from .result_file import PALETTE

WORKLOAD = {"workload": "64q1s4k", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
DIM, SIZE = 128, 32  # head dim and block size of the bits that are drawn
# Whose names stand to the left of their point, where others are to its right.
_LEFT = {"turboquant3", "turboquant_k4v3", "turboquant3:window=64", "turboquant4:window=64"}
Contents = Iterable[Mapping[str, Any]]


def losses(contents: Contents) -> dict[str, float]:
    """The mean KL of all positions, by format."""
    found: dict[str, float] = {}
    for content in contents:
        weights: dict[str, list[tuple[int, float]]] = {}
        for row in content["rows"]:
            if "positions_below" in row:
                name = format_of(row["kv_cache_dtype"]).name
                weights.setdefault(name, []).append((row["positions"], row["kl"]))
        found |= {name: sum(n * kl for n, kl in some) / sum(n for n, _ in some) for name, some in weights.items()}
    return found


def speeds(contents: Contents) -> dict[str, float]:
    """How many times as fast a decode is as over 16 bit, by format."""
    found: dict[str, float] = {}
    for content in contents:
        rows = [row for row in content["rows"] if all(row.get(key) == value for key, value in WORKLOAD.items())]
        times = {(row.get("kv_cache_dtype"), row["backend"]): row["us"] for row in rows if row["us"]}
        found |= {
            name: times[name, "TRITON auto"] / us
            for (name, backend), us in times.items()
            if backend == "TRITON" and (name, "TRITON auto") in times
        }
    return found


def bits(name: str) -> float:
    """Of an element of keys or values, scales included; what a second cache holds is not counted."""
    recent = 1 if format_of(name).whole_blocks else None
    cache = PagedKVCache(1, 1, SIZE, 1, DIM, kv_cache_dtype=name, recent_blocks=recent)
    return cache.bytes_per_block * 8 / (2 * SIZE * DIM)


def figure_of(kl: Mapping[str, float], faster: Mapping[str, float]) -> Figure:
    """A point for each format, hollow where no decode was measured."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, loss in kl.items():
        look: Any = {"color": PALETTE[0], "markerfacecolor": PALETTE[0] if name in faster else "none"}
        axes.plot([bits(name)], [loss], "o", **look)
        text = f"{name} ({faster[name]:.1f}x)" if name in faster else name
        at: Any = {"xytext": (-5, -3), "ha": "right"} if name in _LEFT else {"xytext": (5, -3)}
        axes.annotate(text, (bits(name), loss), textcoords="offset points", fontsize=7, **at)
    axes.set(yscale="log", xlabel="bits of an element, scales included", ylabel="KL divergence from the exact cache's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.25, y=0.1)
    return figure


def main() -> None:
    contents = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[2:]]
    gpus = sorted({content["meta"]["gpu"] for content in contents if content["meta"]["gpu"]})
    with rc_context(LOOK):
        figure = figure_of(losses(contents), speeds(contents))
        figure.suptitle(
            f"Loss, bits, and decodes beside those over 16 bit ({', '.join(gpus)})",
            x=0.01,
            ha="left",
            weight="bold",
        )
        figure.savefig(Path(sys.argv[1]), metadata={"Date": None})


if __name__ == "__main__":
    main()
