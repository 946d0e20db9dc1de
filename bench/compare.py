"""Two installations beside each other: the tables of `pagedattn bench`, each side in processes of its own, in turns.

    python -m bench.compare --side old=/tmp/old --side new=/tmp/new --suite decode --suite prefill --json FILE

A side is a name and what stands first on its PYTHONPATH: another commit of this library, another version of Triton.
Each process checks every row against float64 before it times it. After the last round the first side runs once more,
so that there are two runs of it to tell a difference from the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ratios import geometric_mean

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]
Key = tuple[str, str, str]  # suite, case, backend


def run(path: str, suites: Sequence[str], backends: str, out: Path) -> dict[str, Any]:
    """Meta and rows of all suites, in one process a suite."""
    # Not from the checkout's folder, whose own packages would come first.
    places = [*filter(None, path.split(os.pathsep)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    meta, rows = {}, []
    for suite in suites:
        command = [sys.executable, "-m", "pagedattn", "bench", suite, "--backends", backends, "--json", str(out)]
        done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{suite} failed: {done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
        if out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
            meta, rows = found["meta"], rows + found["rows"]
            out.unlink()
    return {"meta": meta, "rows": rows}


def times(rows: Sequence[Row]) -> dict[Key, float]:
    """Microseconds of the rows that have a time."""
    return {(row["suite"], row["case"], row["backend"]): row["us"] for row in rows if row["us"] is not None}


def compare(first: Sequence[Sequence[Row]], second: Sequence[Sequence[Row]]) -> list[Row]:
    """A row a case: the median time of each side's runs, how far the first's lie apart, and the second's over the
    first's."""
    sides = [[times(rows) for rows in runs] for runs in (first, second)]
    cases = [key for key in sides[0][0] if all(key in run for runs in sides for run in runs)]
    out = []
    for key in cases:
        before, after = ([run[key] for run in runs] for runs in sides)
        old, new = (sorted(values)[len(values) // 2] if len(values) % 2 else sum(values) / len(values)
                    for values in (before, after))  # fmt: skip
        spread = (max(before) - min(before)) / old
        out.append(
            {"suite": key[0], "case": key[1], "backend": key[2], "us": [old, new], "runs": [before, after],
             "spread": round(spread, 4), "ratio": round(new / old, 4)}
        )  # fmt: skip
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", required=True, metavar="NAME=PATH", help="two of them")
    parser.add_argument("--suite", action="append", required=True)
    parser.add_argument("--backends", default="TRITON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sides = [side.partition("=")[::2] for side in options.side]
    if len(sides) != 2:
        parser.error(f"--side must be given twice, got {len(sides)}")
    turns = [*range(2)] * options.rounds + [0]
    runs: tuple[list[list[Row]], list[list[Row]]] = ([], [])
    metas: list[dict[str, Any]] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        for nth in turns:
            found = run(sides[nth][1], options.suite, options.backends, Path(folder) / "rows.json")
            runs[nth].append(found["rows"])
            metas[nth] = {"side": sides[nth][0], **found["meta"]}
            print(f"{sides[nth][0]}: {len(found['rows'])} rows", flush=True)
            if all(runs) and options.json:  # what there is, should the time end before the last turn
                _write(options.json, metas, options.rounds, compare(*runs))
    rows = compare(*runs)
    for row in rows:
        title = f"{row['suite']} {row['case']} {row['backend']}"
        print(f"{title:56} {row['us'][0]:9.2f} {row['us'][1]:9.2f} {row['ratio']:7.3f}  spread {row['spread']:.3f}")
    for suite in dict.fromkeys(row["suite"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["suite"] == suite]
        print(f"{suite}: geometric mean {geometric_mean(ratios):.4f}, worst {max(ratios):.3f}, {len(ratios)} rows")
    expected = max((len(times(run)) for side in runs for run in side), default=0)
    return 0 if rows and len(rows) == expected else 1


def _write(path: Path, metas: Sequence[dict[str, Any]], rounds: int, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"meta": {"sides": metas, "rounds": rounds}, "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
