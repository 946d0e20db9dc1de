"""Do the tests notice? Plants one fault at a time in a copy of the tree and requires that the tests named for it fail.

    python tests/mutants.py [--jobs 2] [--only WORD]

A selection is a line of words: every test whose id holds them all. The unmutated tree must pass all selections first.
Exits 1 if a fault survives, a fault's text is no longer there exactly once, or a selection is empty or fails by itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutant_list
import mutant_list_engine
import mutant_list_hf
import mutant_list_host
from mutant_list import Mutant

LISTS = (mutant_list, mutant_list_host, mutant_list_engine, mutant_list_hf)
MUTANTS = tuple(fault for one in LISTS for fault in one.MUTANTS)
ROOT = Path(__file__).parent.parent
INNER = ("engine", "bench")  # which tests import as pagedattn.engine and pagedattn.bench
PARTS = ("pagedattn", *INNER, "tests", "pyproject.toml")
SECONDS = 180


@dataclass(frozen=True, slots=True)
class Result:
    """What a fault came to: caught, or why not."""

    mutant: Mutant
    caught: bool
    how: str
    seconds: float


def copy_tree(target: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, target / part)
    for part in INNER:  # the copy's own, where another one is installed
        inner = target / "pagedattn" / part
        if not inner.is_symlink():
            inner.symlink_to(Path("..") / part)


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the tree's own code, without a GPU and without stale byte code."""
    settings = {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDATTN_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def pytest(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(tree, "-m", "pytest", "-q", "-p", "no:warnings", *arguments)


def collect(tree: Path, mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """Test ids of each selection.

    Raises:
        SystemExit: a selection is empty.
    """
    files = sorted({mutant.tests.split()[0] for mutant in mutants})
    done = pytest(tree, "--collect-only", *files)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    out = {
        mutant.tests: [one for one in ids if all(word in one for word in mutant.tests.split())] for mutant in mutants
    }
    empty = [tests for tests, chosen in out.items() if not chosen]
    if done.returncode or empty:
        raise SystemExit(f"nothing is selected by {empty}" if empty else f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return out


def check_unmutated(tree: Path, selections: dict[str, list[str]]) -> None:
    """The selections pass, none skipped, on the copy's own code.

    Raises:
        SystemExit: they do not.
    """
    where = python(tree, "-c", "import pagedattn, pagedattn.engine as e; print(pagedattn.__file__, e.__file__)")
    if where.returncode or where.stdout.count(str(tree)) != 2:
        raise SystemExit(f"the copy is not what runs: {where.stdout}{where.stderr}")
    wanted = sorted({one for chosen in selections.values() for one in chosen})
    done = pytest(tree, *wanted)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    if done.returncode or not last.startswith(f"{len(wanted)} passed in"):
        raise SystemExit(f"the unmutated tree does not pass its {len(wanted)} tests:\n{done.stdout[-3000:]}")
    print(f"unmutated: {last}", flush=True)


def plant(tree: Path, mutant: Mutant) -> str | None:
    """Change the text in the tree; what is wrong with the mutant, or None."""
    path = tree / mutant.file
    text = path.read_text()
    for old, new in mutant.changes:
        if text.count(old) != 1:
            return f"its text occurs {text.count(old)} times in {mutant.file}"
        text = text.replace(old, new)
    path.write_text(text)
    return None


def run(mutant: Mutant, chosen: Sequence[str]) -> Result:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        wrong = plant(Path(folder), mutant)
        if wrong is not None:
            return Result(mutant, False, wrong, 0.0)
        try:
            code = pytest(Path(folder), "-x", *chosen).returncode
        except subprocess.TimeoutExpired:
            return Result(mutant, False, f"no answer in {SECONDS} s", SECONDS)
    seconds = time.perf_counter() - start
    if code == 0:
        return Result(mutant, False, "SURVIVED", seconds)
    crashed = code < 0  # a fault in an address may end the process
    return Result(mutant, code == 1 or crashed, {1: "failed"}.get(code, f"exit code {code}"), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="faults whose name holds this word")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="unmutated-") as folder:
        copy_tree(Path(folder))
        selections = collect(Path(folder), mutants)
        check_unmutated(Path(folder), selections)
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(lambda mutant: run(mutant, selections[mutant.tests]), mutants):
            results.append(result)
            mark = "caught" if result.caught else "MISSED"
            print(
                f"{mark}  {result.mutant.name:46} {result.how:16} {result.seconds:5.1f} s  {result.mutant.tests}",
                flush=True,
            )
    caught = sum(result.caught for result in results)
    print(f"{caught} of {len(results)} faults caught in {time.perf_counter() - start:.0f} s")
    return 0 if caught == len(results) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
