"""The helpers that start processes: a script runs once in a test run, and PYTHONPATH keeps what it has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uninterpreted
from processes import CHECKOUT, environment

TESTS = Path(__file__).parent
SCRIPT = """
import os, pathlib, sys, time
log = pathlib.Path({log!r})
with log.open("a", encoding="utf-8") as file:
    file.write("ran\\n")
time.sleep(0.3)
print("interpreted" if "TRITON_INTERPRET" in os.environ else "compiled", os.environ["TRITON_CACHE_DIR"])
sys.exit(os.environ.get("REASON", 0))
"""
# What conftest.py asks of it.
TORCH = """
from types import SimpleNamespace
set_num_threads = print
cuda = SimpleNamespace(is_available=lambda: True)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `script.py` beside it writes a line for each time it runs, in a run of its own."""
    (tmp_path / "script.py").write_text(SCRIPT.format(log=str(tmp_path / "log")), encoding="utf-8")
    monkeypatch.setattr(uninterpreted, "folder", tmp_path)
    return tmp_path / "log"


def test_a_script_runs_once_for_all_who_ask_at_the_same_time(log: Path) -> None:
    script = str(log.with_name("script.py"))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: uninterpreted.output_of(script), range(4)))
    assert answers == [[f"compiled {log.with_name('triton')}"]] * 4
    assert log.read_text(encoding="utf-8") == "ran\n"
    uninterpreted.output_of(script, OTHER="1")
    assert log.read_text(encoding="utf-8") == "ran\nran\n"


def test_a_failure_is_kept_too(log: Path) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="ptxas is missing"):
            uninterpreted.output_of(str(log.with_name("script.py")), REASON="ptxas is missing")
    assert log.read_text(encoding="utf-8") == "ran\n"


def test_the_folder_is_one_for_all_workers(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    shutil.copy(TESTS / "conftest.py", tmp_path)
    # In place of the real ones, which three processes would take 20 seconds of CPU to import.
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")
    (tmp_path / "pagedattn.py").touch()
    test = "import uninterpreted\n\ndef test_it():\n    print('folder:', uninterpreted.folder)\n"
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    options = [
        "-p",
        "xdist",
        "-rP",
        "-n",
        "2",
        "--dist",
        "each",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env=environment(tmp_path, TESTS, TRITON_INTERPRET="0", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
    )
    folders = [line for line in done.stdout.splitlines() if line.startswith("folder:")]
    assert folders == [f"folder: {tmp_path / 'run'}"] * 2, done.stdout + done.stderr


def test_pythonpath_keeps_what_it_has_but_for_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/elsewhere", str(CHECKOUT), "", "/further"]))
    monkeypatch.setenv("PAGEDATTN_X", "1")
    given = environment(tmp_path, without=["PAGEDATTN_"], MORE="2")
    assert given["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/elsewhere", "/further"]
    assert "PAGEDATTN_X" not in given and given["MORE"] == "2"
    assert environment()["PYTHONPATH"].split(os.pathsep) == [str(CHECKOUT), "/elsewhere", "/further"]
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(CHECKOUT)
