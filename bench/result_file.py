"""Result files as data to draw: joined, grouped by workload, with labels and colours."""

from __future__ import annotations

import json
import statistics
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

LineStyle = Literal["-", "--", ":", "-."]
CEILINGS: dict[str, tuple[str, str, LineStyle]] = {  # what reaches it, its unit, and the line that is drawn
    "copy_gb_s": ("copy", "GB/s", "--"),
    "read_gb_s": ("read", "GB/s", ":"),
    "matmul_tflops": ("matrix product", "TFLOP/s", "-."),
}
BANDWIDTH, COMPUTE = ("copy_gb_s", "read_gb_s"), ("matmul_tflops",)
# Okabe and Ito's colours differ under every kind of colour blindness; their black is left for lines and text.
PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#332288", "#882255", "#44AA99"),
    *("#DDCC77", "#AA4499", "#117733"),  # of Tol's, as the three before them
)
OWN = "pagedattn"  # cache operations are the library's, not a backend's
COLOURS = {  # in the order of the bars
    **{OWN: PALETTE[0], "TRITON": PALETTE[0], "GLUON": PALETTE[2], "auto": PALETTE[5]},
    **{"FLASH_ATTN": PALETTE[1], "FLASHINFER": PALETTE[3], "TORCH": "#999999"},
    **{"FA3": PALETTE[4], "FlashInfer": PALETTE[7], "FLASH_MLA": PALETTE[8], "FlashMLA": PALETTE[9]},
}
SHAPE = (
    *("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "kv_cache_dtype"),
    *("window", "softcap", "sinks", "dim_v", "packed"),  # of a row only where its case has them
)
Row = dict[str, Any]


class Family(NamedTuple):
    """Which suite, by which value it is judged, and which measured ceilings bound that value."""

    suite: str
    value: str
    unit: str
    ceilings: tuple[str, ...]


FAMILIES = (
    Family("decode", "gb_s", "GB/s", BANDWIDTH),
    Family("prefill", "tflops", "TFLOP/s", COMPUTE),
    Family("mixed", "tflops", "TFLOP/s", COMPUTE),
    Family("speculative", "gb_s", "GB/s", BANDWIDTH),
    Family("append", "tflops", "TFLOP/s", COMPUTE),
    Family("cache", "gb_s", "GB/s", BANDWIDTH),
    Family("mla", "gb_s", "GB/s", BANDWIDTH),
)
SWEEP = "sweep"  # drawn as curves, not as bars


class Group(NamedTuple):
    """The bars of one workload, in the order in which they are drawn."""

    label: str
    bars: list[tuple[str, float, float]]  # backend, value, microseconds


class Result(NamedTuple):
    """One or several result files of the same GPU as one."""

    meta: Row
    rows: list[Row]


def load(paths: Sequence[Path]) -> Result:
    """Read result files and join them; a backend that several of them measured in one suite is told apart by commit.

    Raises:
        ValueError: no result file, files of different GPUs, or one workload measured twice under one name.
    """
    files = [_read(path) for path in paths]
    gpus = {meta.get("gpu") for meta, _ in files}
    if len(gpus) != 1:
        raise ValueError(f"all files must be of one GPU, got {', '.join(sorted(map(str, gpus)))}; draw them apart")
    owners: dict[tuple[str, str], set[int]] = {}
    for i, (_, rows) in enumerate(files):
        for row in rows:
            owners.setdefault((row["suite"], row["backend"]), set()).add(i)
    joined, seen = [], set()
    for meta, rows in files:
        for row in rows:
            name = row["backend"]
            label = name if len(owners[row["suite"], name]) == 1 else f"{name} @{meta.get('commit')}"
            key = (label, row["suite"], _key(row))
            if key in seen:
                raise ValueError(f"{row['suite']} {row['workload']} of {label} is in these files more than once")
            seen.add(key)
            joined.append({**row, "backend": label})
    return Result(_join_meta([meta for meta, _ in files]), joined)


def _read(path: Path) -> Result:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        suites = {*(family.suite for family in FAMILIES), SWEEP}
        rows = [row for row in content["rows"] if row["suite"] in suites]
        result = Result(content["meta"], [{**row, "backend": row.get("backend") or OWN} for row in rows])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.absolute()} is no result file ({type(error).__name__}: {error})") from error
    if not rows:
        raise ValueError(f"{path} has no row of {', '.join(sorted(suites))}: nothing to draw")
    return result


def _join_meta(metas: Sequence[Row]) -> Row:
    """Every fact of the files: a ceiling is the highest that was reached, other facts are listed."""
    out: Row = {}
    for name in {name: None for meta in metas for name in meta}:
        values = [meta[name] for meta in metas if meta.get(name) is not None]
        if any(isinstance(value, dict) for value in values):
            out[name] = {key: value for one in values for key, value in one.items()}
        elif name in CEILINGS:
            out[name] = max(values, default=None)
        else:
            out[name] = ", ".join(dict.fromkeys(map(str, values)))
    return out


def _key(row: Row) -> tuple[Any, ...]:
    return (row["workload"], *(row.get(name) for name in (*SHAPE, "draw")))


def groups(rows: Iterable[Row], family: Family) -> list[Group]:
    """One group per workload in the files' order; rows without a value (skipped, failed) make no bar."""
    kept = [row for row in rows if row["suite"] == family.suite and row.get(family.value) is not None]
    varying = [name for name in SHAPE if len({row.get(name) for row in kept}) > 1]
    order = {name: i for i, name in enumerate(series(kept))}
    found: dict[tuple[Any, ...], Group] = {}
    for row in kept:
        group = found.setdefault(_key(row), Group(_label(row, varying), []))
        group.bars.append((row["backend"], row[family.value], row["us"]))
    for group in found.values():
        group.bars.sort(key=lambda bar: order[bar[0]])
    return list(found.values())


def _label(row: Row, varying: Sequence[str]) -> str:
    parts = [f"{row['num_heads']}/{row['num_kv_heads']} heads"] if {"num_heads", "num_kv_heads"} & {*varying} else []
    parts += [f"D {row['head_dim']}"] if "head_dim" in varying else []
    parts += [f"blocks of {row['block_size']}"] if "block_size" in varying else []
    parts += [str(row["dtype"])] if "dtype" in varying else []
    parts += [f"{row.get('kv_cache_dtype') or 'auto'} cache"] if "kv_cache_dtype" in varying else []
    parts += _extras(row, varying)
    return "\n".join([row["workload"], *([", ".join(parts)] if parts else [])])


def _extras(row: Row, names: Iterable[str]) -> list[str]:
    """What a row has that most have not, of those named: a window, a soft cap and so on."""
    texts = {
        "window": f"window {row.get('window')}",
        "softcap": f"soft cap {row.get('softcap') or 0:g}",
        "sinks": "sinks",
        "dim_v": f"values of {row.get('dim_v')}",
        "packed": "packed",
    }
    return [text for name, text in texts.items() if name in names and row.get(name)]


def shape_text(rows: Sequence[Row]) -> str:
    """What all rows have in common, for the subtitle."""
    same = {name: rows[0].get(name) for name in SHAPE if len({row.get(name) for row in rows}) == 1}
    parts = []
    if same.get("num_heads") and same.get("num_kv_heads"):
        parts.append(f"{same['num_heads']} query and {same['num_kv_heads']} KV heads")
    parts += [f"head dim {same['head_dim']}"] if same.get("head_dim") else []
    parts += [f"blocks of {same['block_size']}"] if same.get("block_size") else []
    parts += [str(same["dtype"])] if same.get("dtype") else []
    parts += [f"{same['kv_cache_dtype']} cache"] if same.get("kv_cache_dtype") else []
    parts += _extras(rows[0], same)
    return ", ".join(parts)


def series(rows: Iterable[Row]) -> list[str]:
    """The backends of these rows: in the order of COLOURS, others by name, one backend's files as they were given."""
    known = [*COLOURS]
    names = dict.fromkeys(row["backend"] for row in rows)
    rank = {name: known.index(base(name)) if base(name) in COLOURS else len(known) for name in names}
    return sorted(names, key=lambda name: (rank[name], base(name)))


def base(name: str) -> str:
    """`FLASH_ATTN` of `FLASH_ATTN (FA3) @c0f3bb1`."""
    return name.partition(" @")[0].partition(" (")[0]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per backend: always the same for a known name; for another, by its name among the free ones."""
    out = {name: COLOURS[base(name)] for name in names if base(name) in COLOURS}
    for name in sorted({base(name) for name in names} - set(COLOURS)):
        free = [one for one in PALETTE if one not in out.values()] or list(PALETTE)
        colour = free[zlib.crc32(name.encode()) % len(free)]
        out.update({full: colour for full in names if base(full) == name})
    return out


def host_table(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Per backend: its name, host time of one layer call and planning time of one step, each `median (low to high)`."""
    kept = [row for row in rows if row["suite"] == "decode" and row.get("host_us") is not None]
    table = []
    for name in series(kept):
        mine = [row for row in kept if row["backend"] == name]
        table.append((name, _spread(row["host_us"] for row in mine), _spread(row.get("plan_us") for row in mine)))
    return table


def _spread(values: Iterable[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "not measured"
    return f"{short(statistics.median(there))} ({short(min(there))} to {short(max(there))})"


def short(value: float) -> str:
    """A number of three figures or its integer part, as bars print it."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def time_text(us: float) -> str:
    """A duration with its unit."""
    return f"{short(us)} µs" if us < 10_000 else f"{short(us / 1000)} ms"


def title(meta: Mapping[str, Any], suite: str, rows: Sequence[Row]) -> tuple[str, str]:
    """What and where; then how it can be made again: shapes, commit, date and versions."""
    drawn = [row for row in rows if row["suite"] == suite]
    versions = {**meta.get("backends", {}), **meta.get("peers", {}), "TORCH": ""}  # torch itself is named below
    used = [f"{name} {versions[name]}" for name in dict.fromkeys(map(base, series(drawn))) if versions.get(name)]
    facts = [f"torch {meta.get('torch')}", *used, f"commit {meta.get('commit')}", str(meta.get("date"))]
    note = [shape_text(drawn), *textwrap.wrap(", ".join(facts), 120)]
    return f"{suite} on {meta.get('gpu') or meta.get('cpu')}", "\n".join(filter(None, note))
