"""Rows as text and as a file: a line each while they come, and one JSON object that holds what is there so far."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pagedattn
from pagedattn.errors import InvalidInputError

from .contenders import Contender
from .ratios import BEHIND, JUDGED, PHASES, TRITON_AUTO, Row, beside_auto, break_evens, judge, library, summarise
from .table import LATENT

_COLUMNS = ("us", "GB/s", "TF/s", "copy", "read", "mma", "FA3", "FlashInfer", "%s", "error", "plan us", "host us")
_WIDTHS = (9, 6, 7, 6, 6, 6, 7, 11, 9, 9, 8, 8)
_CASE, _BACKEND = 47, 24
STDOUT = Path("-")  # as a result file's name: what it would hold is printed at the end
_DISTRIBUTIONS = {
    "FA3": "flash-attn-3",
    "FlashInfer": "flashinfer-python",
    "FlashMLA": "flash_mla",
    "vllm TURBOQUANT": "vllm",
}


class ResultFile:
    """`meta` and `rows`, written again with every case: what ends a run early leaves what was measured.

    Args:
        path: None keeps the rows only, STDOUT has `print_json` print them.

    Raises:
        InvalidInputError: no file can be written there; found before anything is measured.
    """

    def __init__(self, path: Path | None, ceilings: Mapping[str, float], contenders: Sequence[Contender]) -> None:
        self.printed = path == STDOUT
        self.path = None if self.printed else path
        if self.path is not None:
            _check_writable(self.path)
        self.rows = list[Row]()
        self.meta = meta([one.name for one in contenders if one.peer]) | dict(ceilings)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows, and write the file."""
        self.rows += rows
        self.meta["summary"] = summarise(self.rows)
        self.meta |= {"beside_auto": compared} if (compared := beside_auto(self.rows)) else {}
        if any("draw" in row for row in rows):
            self.meta["judged"] = judge(self.rows)
        self.meta |= {"break_even": found} if (found := break_evens(self.rows)) else {}
        self._write()

    def add_plain(self, row: Row) -> None:
        """As `add`, a row without a peer."""
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            partial = _partial(self.path)
            partial.write_text(self._text() + "\n", encoding="utf-8")
            partial.replace(self.path)

    def print_json(self) -> None:
        """Print the object, where that was asked for and not a file."""
        if self.printed:
            print(self._text())

    def _text(self) -> str:
        return json.dumps({"meta": self.meta, "rows": self.rows}, indent=1)


def _check_writable(path: Path) -> None:
    """Make the folder of a result file, and raise InvalidInputError where no such file can be written."""
    if path.is_dir():
        raise InvalidInputError("--json", "a file", f"the folder {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _partial(path).touch()
        _partial(path).unlink()
    except OSError as error:
        got = f"{path.absolute()}: {error.strerror}"
        raise InvalidInputError("--json", "a file that can be written", got) from error


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def meta(peers: Sequence[str] = ()) -> dict[str, Any]:
    """Where and with what something was measured."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "pagedattn": pagedattn.__version__,
        "backends": pagedattn.list_backends(),
        "peers": {name: _version(_DISTRIBUTIONS.get(name, name)) for name in dict.fromkeys(map(library, peers))},
        "commit": os.environ.get("COMMIT") or _commit(Path(__file__).parent),
        "date": datetime.date.today().isoformat(),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown version"


def _commit(folder: Path) -> str:
    """Of the checkout that this file is part of."""
    if not (folder.parent / "setup.py").exists():
        return "unknown"
    try:
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def header(suite: str | None = None) -> str:
    """The columns' names: `copy`, `read`, `mma` are percent of ceilings, `FA3`, `FlashInfer` and `auto` (TRITON over a
    cache in the model's dtype; of the suite LATENT, which has one format, FlashMLA) ratios to those."""
    names = [name.replace("%s", "FlashMLA" if suite == LATENT else "auto") for name in _COLUMNS]
    cells = "".join(f"{name:>{width}}" for name, width in zip(names, _WIDTHS, strict=True))
    return f"{'workload':{_CASE}}{'contender':{_BACKEND}}{cells}"


def line(row: Row) -> str:
    """A row under those names, or why there is no time."""
    title = f"{row['suite']} {row['case']}"
    start = f"{title:{_CASE - 1}} {row['backend']:{_BACKEND - 1}} "
    if row["us"] is None:
        why = str(row["refused"])
        return f"{start} {why if why.startswith('wrong: ') else f'refused: {why}'}"
    ratios, compared = row["ratios"] or {}, "FlashMLA" if row["suite"] == LATENT else TRITON_AUTO
    values = (
        *(f"{row['us']:.1f}", _number(row["gb_s"], ".0f"), _number(row["tflops"], ".1f")),
        *(_number(row[f"{name}_percent"], ".0f", "%") for name in ("copy", "read", "matmul")),
        *(_number(ratios.get(name), ".3f") for name in ("FA3", "FlashInfer", compared)),
        *(_number(row["error"], ".1e"), _number(row["plan_us"], ".0f"), _number(row["host_us"], ".0f")),
    )
    return start + "".join(f"{text:>{width}}" for text, width in zip(values, _WIDTHS, strict=True))


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def summary_lines(meta: Mapping[str, Any]) -> list[str]:
    """Geometric means and the worst row of each contender: the best peer's time over its own, and of formats that of
    TRITON over a cache in the model's dtype."""
    lines = []
    for name, facts in meta["summary"].items():
        worst = f"{facts['behind']} below {BEHIND}, {_worst_of(facts)}"
        lines.append(f"{name} against the best peer: " + ", ".join([*_means_of(facts, PHASES), worst]))
    for name, facts in meta.get("beside_auto", {}).items():
        suites = [suite for suite in facts if suite not in ("slower", "worst")]
        worst = f"{facts['slower']} slower, {_worst_of(facts)}"
        lines.append(f"{name} against {TRITON_AUTO}: " + ", ".join([*_means_of(facts, suites), worst]))
    for name, tokens in meta.get("break_even", {}).items():
        lines.append(f"{name}: expanded takes less from {'no number of' if tokens is None else tokens} new tokens on")
    return lines + (_judged_lines(meta["judged"]) if "judged" in meta else [])


def _judged_lines(judged: Mapping[str, Any]) -> list[str]:
    """Of random cases: each kind's mean and worst rows, then what share of all is behind."""
    lines = []
    for kind, facts in judged["kinds"].items():
        worst = "; ".join(f"{one['ratio']:.3f} at {one['case']}" for one in facts["worst"])
        lines.append(f"{JUDGED} {kind}: {facts['ratio']:.3f} ({_below_of(facts)}), worst {worst}")
    return [*lines, f"{JUDGED} in all: {_below_of(judged)}, {judged['without_peer']} without a peer"]


def _below_of(facts: Mapping[str, Any]) -> str:
    below = (
        f"{one['rows']} ({one['share']:.1%}) {name.replace('_', ' ')}" for name, one in facts.items() if "below" in name
    )
    return ", ".join([f"{facts['rows']} rows", *below])


def _means_of(facts: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{name} {facts[name]['ratio']:.3f} ({facts[name]['rows']} rows)" for name in names if name in facts]


def _worst_of(facts: Mapping[str, Any]) -> str:
    return f"worst {facts['worst']['ratio']:.3f} at {facts['worst']['case']}"


class Progress:
    """Lines, and a bar below them where they go to a terminal; on standard error where standard output is for JSON."""

    def __init__(self, total: int, json: Path | None = None) -> None:
        self.stream = sys.stderr if json == STDOUT else sys.stdout
        self.total, self.done, self.shown = total, 0, self.stream.isatty()

    def tell(self, text: str) -> None:
        """Draw the bar again, with what is under way."""
        if self.shown:
            filled = 30 * self.done // max(self.total, 1)
            line = f"\r\x1b[K[{'#' * filled:.<30}] {self.done}/{self.total} {text[:60]}"
            print(line, end="", flush=True, file=self.stream)

    def say(self, text: str) -> None:
        """Print a line where the bar was."""
        print(("\r\x1b[K" if self.shown else "") + text, flush=True, file=self.stream)
