"""The README is short, each of its blocks runs alone, and its tables are held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedattn.backends.registry import backend_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.split()) <= 1000, "put it on a page of docs/"


def test_the_test_command_is_in_it() -> None:
    assert re.search(r"^make test\b", README, re.MULTILINE)


def test_each_python_block_runs_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert len(BLOCKS) >= 4
    assert "chosen by" in printed and printed.count("A block table") == 2  # of the engine, and of transformers


def test_backend_table_names_every_backend() -> None:
    assert set(backend_names()) <= set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
