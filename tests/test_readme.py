"""The README is executed, and its tables are held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedattn import env
from pagedattn.backends.registry import backend_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert len(BLOCKS) >= 4
    assert "cases passed" in printed and "chosen by" in printed and "A block table" in printed


def test_environment_table_is_env_py() -> None:
    table = dict(re.findall(r"^\| `(PAGEDATTN_\w+)` \| (.+) \|$", README, re.MULTILINE))
    assert table == env.VARIABLES and 1 <= len(table) <= 8


def test_backend_table_names_every_backend() -> None:
    assert set(backend_names()) <= set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
