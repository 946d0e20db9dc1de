"""The faults of `mutants.py` have their place, wherever code moves: the run itself takes too long for every change."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutant_anchor import AnchorError, Fault, module_of, mutated
from mutant_run import Run
from mutants import FAULTS, ROOT, Trees, judged, passing

FREE = """
LIMIT = 4

class Pool:
    @property
    def room(self):
        return LIMIT - self.held

    def free(self, blocks):
        for block in reversed(blocks):
            if block.count == 0:
                self.queue.append(block)
        self.held -= len(blocks)

    sizes: tuple[int, ...] = 16, 32
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_a_test_module(fault: Fault) -> None:
    file, text = mutated(ROOT, fault)
    assert text != (ROOT / file).read_text(encoding="utf-8")
    assert (ROOT / module_of(ROOT, fault)).is_file()


def test_names_of_faults_are_unique() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def write(root: Path, file: str, text: str = FREE) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def fault(holder: str, old: str, new: str = "pass", tests: str = "test_pool.py") -> Fault:
    return Fault("a name", holder, old, new, tests)


@pytest.mark.parametrize("file", ["pagedattn/pool.py", "engine/kv/blocks.py"])
def test_a_function_is_found_in_whatever_file_it_is(tmp_path: Path, file: str) -> None:
    write(tmp_path, file)
    assert mutated(tmp_path, fault("Pool.free", "reversed(blocks)", "blocks")) == (
        Path(file),
        FREE.replace("reversed(blocks)", "blocks"),
    )


def test_white_space_does_not_count_and_new_lines_are_indented(tmp_path: Path) -> None:
    deeper = FREE.replace("\n", "\n  ").replace("self.queue.append(block)", "self.queue.append(\nblock)")
    write(tmp_path, "engine/pool.py", f"if True:{deeper}")
    change = fault("Pool.free", "if block.count == 0:\n    self.queue.append(block)", "a()\nif b:\n    c()")
    _, text = mutated(tmp_path, change)
    assert "(blocks):\n              a()\n              if b:\n                  c()\n          self.held" in text


@pytest.mark.parametrize(
    ("holder", "old"),
    [
        ("LIMIT", "4"),
        ("Pool", "return LIMIT - self.held"),
        ("Pool.sizes", "32"),
        ("Pool.room", "@property"),
        ("Pool.free", " -= len(blocks)"),
    ],
)
def test_constants_classes_and_decorators_hold_text_too(tmp_path: Path, holder: str, old: str) -> None:
    write(tmp_path, "engine/pool.py")
    assert mutated(tmp_path, fault(holder, old))[1].count("pass") == 1


def test_one_name_in_two_files_is_told_apart_by_its_text_or_a_word_of_the_path(tmp_path: Path) -> None:
    write(tmp_path, "engine/decode/kernel.py")
    write(tmp_path, "pagedattn/prefill.py", FREE.replace("LIMIT - self.held", "0"))
    assert mutated(tmp_path, fault("Pool.room", "return 0"))[0] == Path("pagedattn/prefill.py")
    for word, file in {"decode": "engine/decode/kernel.py", "prefill": "pagedattn/prefill.py"}.items():
        assert mutated(tmp_path, fault(f"{word}:Pool.free", "reversed(blocks)"))[0] == Path(file)
    with pytest.raises(AnchorError, match=r"(?s)got 2 places.*pagedattn/prefill.py:10.*engine/decode/kernel.py:10"):
        mutated(tmp_path, fault("Pool.free", "reversed(blocks)"))


@pytest.mark.parametrize(
    ("holder", "old", "wrong"),
    [
        ("Pool.free", "sorted(blocks)", r"no such text there.*in: nothing"),
        ("Pool.free", "LIMIT - self.held", r"no such text.*in:\n  engine/pool.py:7 Pool.room$"),
        ("Pool.take", "LIMIT - self.held", r"nothing of that name.*in:\n  engine/pool.py:7 Pool.room$"),
        ("swap:Pool.free", "reversed(blocks)", r"nothing of that name.*in:\n  engine/pool.py:10 Pool.free$"),
        ("Pool.free", "block", r"got 6 places"),
        ("Pool.free", "", "must not be empty"),
    ],
)
def test_a_fault_without_one_place_is_refused(tmp_path: Path, holder: str, old: str, wrong: str) -> None:
    write(tmp_path, "engine/pool.py")
    with pytest.raises(AnchorError, match=wrong):
        mutated(tmp_path, fault(holder, old))


def test_a_test_module_is_found_by_its_name_alone(tmp_path: Path) -> None:
    write(tmp_path, "tests/kv/test_pool.py")
    assert module_of(tmp_path, fault("Pool.free", "")) == Path("tests/kv/test_pool.py")
    write(tmp_path, "tests/test_pool.py")
    with pytest.raises(AnchorError, match=r"tests/kv/test_pool.py, tests/test_pool.py"):
        module_of(tmp_path, fault("Pool.free", ""))
    with pytest.raises(AnchorError, match="no file"):
        module_of(tmp_path, fault("Pool.free", "", tests="test_table.py"))


@pytest.mark.parametrize(
    ("code", "outcome", "caught", "how"),
    [
        (1, "failed", True, "failed"),
        (1, "error", False, "errors only"),
        (0, "passed", False, "SURVIVED"),
        (0, "skipped", False, "SURVIVED"),
        (-signal.SIGSEGV, "running", True, "signal 11"),
        (-signal.SIGSEGV, "passed", False, "signal 11"),
        (-signal.SIGKILL, "running", False, "signal 9"),
        (2, "failed", False, "exit code 2"),
        (None, "running", False, "no answer in 180 s"),
    ],
)
def test_only_a_test_that_fails_or_crashes_catches_a_fault(
    code: int | None, outcome: str, caught: bool, how: str
) -> None:
    result = judged(FAULTS[0], Run(code, {"test_a": "passed", "test_b": outcome}, ""), 1.0)
    assert (result.caught, result.how) == (caught, how)


class Given(Trees):
    """Runs that are given, not run."""

    def __init__(self, *runs: Run) -> None:
        self.runs = list(runs)

    def map(self, do: Callable[..., Any], things: Sequence[Any]) -> list[Any]:
        return self.runs


MODULE = Path("tests/test_pool.py")
SEEDS = fault("Pool.free", "", tests="test_pool.py test_random[")


def seeds(*outcomes: str, code: int = 0) -> Given:
    return Given(Run(code, {f"{MODULE}::test_random[{seed}]": outcome for seed, outcome in enumerate(outcomes)}, ""))


def test_what_is_skipped_without_a_fault_is_told_and_not_run_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert passing(seeds("skipped", "passed"), {SEEDS: MODULE}) == {SEEDS: [f"{MODULE}::test_random[1]"]}
    assert f"skipped {MODULE}::test_random[0]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        (seeds("skipped", "skipped"), "nothing passes of what is selected by"),
        (seeds(), "nothing passes of what is selected by"),
        (seeds("passed", "failed", code=1), "without a fault: exit code 1 .*failed"),
        (seeds("passed", "xskipped"), "without a fault: exit code 0 .*xskipped"),
        (seeds("passed", code=70), "without a fault: exit code 70"),
    ],
)
def test_a_selection_must_pass_without_a_fault(runs: Given, wrong: str) -> None:
    with pytest.raises(SystemExit, match=wrong):
        passing(runs, {SEEDS: MODULE})
