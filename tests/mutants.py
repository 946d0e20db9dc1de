"""Do the tests notice? Plants one fault at a time in a copy of the tree and requires that a test named for it fails.

    python tests/mutants.py [--jobs 2] [--only WORD]

The faults are `FAULTS` of every tests/mutant_list*.py; `mutant_anchor.Fault` says what one is made of.

A fault is caught when pytest exits with 1 and at least one of its tests failed, or when a test ends the process by a
signal that a wrong address or an assertion sends. Errors in fixtures, hangs, a process that was killed and code that
cannot be imported catch nothing: the fault is missed, and what happened is said.

Without a fault, each selection must pass, in one test at least. What is skipped there is listed and run no more, since
it cannot catch anything; any other outcome ends the run before the first fault, as do a selection of nothing and a
fault without a place. Exits 1 then, and where a fault is missed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from mutant_anchor import AnchorError, Fault, module_of, mutated
from mutant_run import ROOT, Run, Tree, prepare, selects

LISTS = tuple(sorted(file.stem for file in Path(__file__).parent.glob("mutant_list*.py")))
FAULTS: tuple[Fault, ...] = tuple(fault for one in LISTS for fault in import_module(one).FAULTS)
SECONDS = 180
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Result:
    """What a fault came to: caught, or why not."""

    fault: Fault
    caught: bool
    how: str
    seconds: float


class Trees:
    """Copies of the tree, one for each of the jobs that run at once."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._jobs, self._idle = jobs, SimpleQueue[Tree]()
        for job in range(jobs):
            (folder / str(job)).mkdir()
            self._idle.put(Tree(folder / str(job)))

    def map(self, do: Callable[[Tree, T], S], things: Sequence[T]) -> list[S]:
        def one(thing: T) -> S:
            tree = self._idle.get()
            try:
                return do(tree, thing)
            finally:
                self._idle.put(tree)

        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(one, things))


def places(faults: Sequence[Fault]) -> dict[Fault, tuple[Path, str, Path]]:
    """File, its text with the fault, and test module of each fault.

    Raises:
        SystemExit: there is none.
    """
    out, wrong = {}, []
    for fault in faults:
        try:
            out[fault] = (*mutated(ROOT, fault), module_of(ROOT, fault))
        except AnchorError as error:
            wrong.append(str(error))
    if wrong:
        raise SystemExit("\n".join(wrong))
    return out


def passing(trees: Trees, modules: dict[Fault, Path]) -> dict[Fault, list[str]]:
    """Ids of the tests that pass without the fault.

    Raises:
        SystemExit: a selection has none, or tests do not pass.
    """
    words = {fault: fault.tests.split()[1:] for fault in modules}
    files = sorted(set(modules.values()))

    def unmutated(tree: Tree, file: Path) -> Run:
        return tree.run([str(file)], 10 * SECONDS, [words[fault] for fault, its in modules.items() if its == file])

    runs = dict(zip(files, trees.map(unmutated, files), strict=True))
    wrong = []
    for file, run in runs.items():
        others = {test: how for test, how in run.outcomes.items() if how not in ("passed", "skipped")}
        if run.code != 0 or others:
            wrong.append(f"{file} without a fault: exit code {run.code} {others}\n{run.output[-3000:]}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    outcomes = {test: how for run in runs.values() for test, how in run.outcomes.items()}
    for test in sorted(test for test, how in outcomes.items() if how == "skipped"):
        print(f"skipped {test}")
    passed = [test for test, how in outcomes.items() if how == "passed"]
    out = {
        fault: [test for test in passed if test.startswith(f"{file}::") and selects(words[fault], test)]
        for fault, file in modules.items()
    }
    if empty := sorted({fault.tests for fault, tests in out.items() if not tests}):
        raise SystemExit(f"nothing passes of what is selected by {empty}")
    print(f"unmutated: {len(passed)} passed", flush=True)
    return out


def judged(fault: Fault, run: Run, seconds: float) -> Result:
    outcomes = set(run.outcomes.values())
    if run.code == 1:
        return Result(fault, "failed" in outcomes, "failed" if "failed" in outcomes else "errors only", seconds)
    if run.code is None:
        return Result(fault, False, f"no answer in {SECONDS} s", seconds)
    if run.code < 0:
        return Result(fault, -run.code in CRASHES and "running" in outcomes, f"signal {-run.code}", seconds)
    return Result(fault, False, "SURVIVED" if run.code == 0 else f"exit code {run.code}", seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="faults whose name holds this word")
    arguments = parser.parse_args()
    start = time.perf_counter()
    planted = places([fault for fault in FAULTS if arguments.only in fault.name])
    prepare()

    def attack(tree: Tree, fault: Fault) -> Result:
        file, text, _ = planted[fault]
        begin = time.perf_counter()
        tree.write(file, text)
        try:
            result = judged(fault, tree.run(selections[fault], SECONDS), time.perf_counter() - begin)
        finally:
            tree.write(file, (ROOT / file).read_text(encoding="utf-8"))
        mark = "caught" if result.caught else "MISSED"
        print(f"{mark}  {fault.name:46} {result.how:16} {result.seconds:5.1f} s  {fault.tests}", flush=True)
        return result

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = Trees(Path(folder), arguments.jobs)
        selections = passing(trees, {fault: module for fault, (_, _, module) in planted.items()})
        results = trees.map(attack, list(planted))
    caught = sum(result.caught for result in results)
    print(f"{caught} of {len(results)} faults caught in {time.perf_counter() - start:.0f} s")
    return 0 if caught == len(results) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
