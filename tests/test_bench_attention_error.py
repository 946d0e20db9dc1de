"""`python -m bench.attention_error`: formats lose what their bits allow, and no more over longer contexts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedattn.bench import attention_error
from pagedattn.formats.registry import FORMATS, format_of

RESULTS = Path(__file__).parent.parent / "bench/results/cpu"


def test_results_have_every_format_at_every_context() -> None:
    files = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("attention_error*.json")]
    rows = {(format_of(row["kv_cache_dtype"]).name, row["keys"]): row for file in files for row in file["rows"]}
    assert {*rows} == {(name, keys) for name in FORMATS if name != "auto" for keys in (128, 512, 2048, 8192, 32768)}
    assert all(0 < row["largest"] and row["worst_cosine"] <= row["cosine"] < 1 for row in rows.values())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "auto"])
def test_results_are_those_of_what_is_stored_today(name: str) -> None:
    files = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("attention_error*.json")]
    (kept,) = (
        row
        for file in files
        for row in file["rows"]
        if (format_of(row["kv_cache_dtype"]).name, row["keys"]) == (name, 128)
    )
    (row,) = attention_error.errors([name], 128, 128)
    for number in ("cosine", "worst_cosine", "largest"):
        assert row[number] == pytest.approx(kept[number], abs=1e-5)


def test_rows_by_format_and_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "error.json"
    formats = ("auto", "int8", "fp8", "k8v4", "turboquant4", "turboquant2")
    arguments = ["--formats", *formats, "--keys", "32", "600", "--dim", "48", "--json", str(file)]
    assert attention_error.main(arguments) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["keys"], row["kv_cache_dtype"]) for row in rows] == [
        (keys, name) for keys in (32, 600) for name in formats
    ]
    for exact, int8, fp8, k8v4, turbo4, turbo2 in (rows[:6], rows[6:]):
        assert exact["largest"] == 0 and exact["cosine"] == 1
        assert 0 < int8["largest"] < fp8["largest"] < 0.5 and int8["largest"] < k8v4["largest"] < 0.5
        assert 1 > int8["cosine"] > k8v4["cosine"] > 0.98 and int8["worst_cosine"] <= int8["cosine"]
        assert k8v4["cosine"] > turbo4["cosine"] > 0.94 and turbo4["cosine"] > turbo2["cosine"] > 0.5
    assert "600 keys: cosine" in capsys.readouterr().out
