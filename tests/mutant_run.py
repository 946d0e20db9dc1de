"""Runs tests of a copy of the tree, each time in a process forked from one that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
INNER = ("engine", "bench")  # which tests import as pagedattn.engine and pagedattn.bench
PARTS = ("pagedattn", *INNER, "tests", "pyproject.toml")
PRELOADED = ("torch", "numpy", "triton", "triton.language", "hypothesis", "transformers", "pytest")
FOREIGN = 70  # exit code: code of another tree was run


class Run(NamedTuple):
    """What came of a run: exit code (negative: a signal; None: no answer in time), outcome by test id, output."""

    code: int | None
    outcomes: dict[str, str]
    output: str


class Tree:
    """A copy of the tree, in a folder of its own. Bytecode is kept from run to run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve() / "tree"
        self._output, self._outcomes = folder / "output", folder / "outcomes"
        skip = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for part in PARTS:
            source, target = ROOT / part, self.root / part
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=skip)
            else:
                shutil.copy(source, target)
        for part in INNER:  # the copy's own, where another one is installed
            inner = self.root / "pagedattn" / part
            if not inner.is_symlink():
                inner.symlink_to(Path("..") / part)

    def write(self, file: Path, text: str) -> None:
        """Change a file; its bytecode goes, which a change within a second of the last might not outdate."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()

    def run(self, tests: Sequence[str], seconds: float, selections: Sequence[Sequence[str]] = ((),)) -> Run:
        """Run tests whose ids hold all words of a selection, until one fails."""
        context = multiprocessing.get_context("forkserver")
        for file in (self._output, self._outcomes):  # a process that dies early leaves none of an earlier one's
            file.write_bytes(b"")
        arguments = (self.root, tests, selections, self._output, self._outcomes)
        process = context.Process(target=_child, args=arguments)
        process.start()
        process.join(seconds)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            code = None
        else:
            code = process.exitcode
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # what one fault fails must not be tried first
        lines = self._outcomes.read_text(encoding="utf-8").splitlines()
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return Run(code, dict(json.loads(line) for line in lines), output)


def prepare() -> None:
    """Set what the tests' processes inherit: no GPU, no settings of the user's."""
    for name in [name for name in os.environ if name.startswith("PAGEDATTN_")]:
        del os.environ[name]
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))


class _Recorder:
    def __init__(self, lines: IO[str], selections: Sequence[Sequence[str]]) -> None:
        self._lines, self._selections = lines, selections

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(selects(words, item.nodeid) for words in self._selections)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._write(item.nodeid, "running")  # and stays so, where the test ends the process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = f"x{report.outcome}" if hasattr(report, "wasxfail") else report.outcome
        if report.failed and report.when != "call":
            outcome = "error"
        self._write(report.nodeid, outcome)

    def _write(self, test: str, outcome: str) -> None:
        self._lines.write(json.dumps([test, outcome]) + "\n")
        self._lines.flush()


def selects(words: Sequence[str], test: str) -> bool:
    """Whether a test's id, without its path, holds all words."""
    return all(word in test.partition("::")[2] for word in words)


def _is_of_the_checkout(folder: Path) -> bool:
    """Whether it holds the tree's own modules; an environment may lie in the checkout too."""
    return ROOT in (folder, *folder.parents) and "site-packages" not in folder.parts


def _child(tree: Path, tests: Sequence[str], selections: Sequence[Sequence[str]], output: Path, report: Path) -> None:
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(one for one in sys.path if not _is_of_the_checkout(Path(one)))]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = False
    with report.open("w", encoding="utf-8") as lines:
        options = ["-q", "-x", "-p", "no:warnings", "--every-case"]
        code = int(pytest.main([*options, *tests], plugins=[_Recorder(lines, selections)]))
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "pagedattn"}
    if foreign := [name for name, one in ours.items() if tree not in Path(one.__file__ or "").parents]:
        print(f"not of the copy: {foreign}")
        code = FOREIGN
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
