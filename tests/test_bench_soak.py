"""The soak gives rows of an engine that ran empty, and says what grew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedattn.bench import soak


def test_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "_ALIVE", 8)
    monkeypatch.setattr(soak, "_PARTS", 2)
    file = tmp_path / "soak.json"
    assert soak.main(["--tokens", "2000", "--json", str(file)]) == 0
    assert "nothing grew" in capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2 and sum(row["generated_tokens"] for row in rows) >= 2000
    for row in rows:
        assert (row["blocks_held"], row["host_blocks_held"]) == (0, 0)
        assert row["resident_mib"] > 50 and row["objects"] > 1000 and 0 < row["hit_rate"] < 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"resident_mib": 103}, ["resident_mib grew from 100 to 103"]),
        ({"objects": 1021}, ["objects grew from 1000 to 1021"]),
        ({"blocks_held": 2, "host_blocks_held": 1}, ["part 2: 2 blocks_held", "part 2: 1 host_blocks_held"]),
    ],
    ids=str,
)
def test_what_grew_is_said(changed: dict[str, int], said: list[str]) -> None:
    first = {"resident_mib": 40, "objects": 900, "blocks_held": 0, "host_blocks_held": 0}
    usual = {**first, "resident_mib": 100, "objects": 1000}
    assert soak.faults([first, usual, {**usual, **changed}]) == said
