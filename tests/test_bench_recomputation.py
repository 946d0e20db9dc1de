"""`python -m bench.recomputation` on a CPU: pasts whose rows are exact lose least."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedattn.bench import recomputation

MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"


def test_rows_of_two_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "LAST", 32)
    text, file = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text((MODEL / "corpus.txt").read_text(encoding="utf-8")[:2000], encoding="utf-8")
    options = ["--tokens", "100", "--ahead", "20", "--text", str(text), "--json", str(file)]
    assert recomputation.main([str(MODEL), "--formats", "int8", "turboquant2", *options]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["tokens"] for row in rows] == [96] * 6 and {row["ahead"] for row in rows} == {23}
    int8, turbo = (
        {row["rows"]: row["kl"] for row in rows if row["kv_cache_dtype"] == name} for name in ("int8", "turboquant2")
    )
    assert 0 < int8["all anew"] < 1e-3 and max(int8.values()) < turbo["all anew"] < turbo["as they came"]
    assert turbo["a tenth anew"] != turbo["as they came"]


def test_rows_come_back_as_their_format_stores_them() -> None:
    sides = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    for back, rows in zip(recomputation.encoded(sides, "int8"), sides, strict=True):
        assert back.shape == rows.shape and 0 < float((back - rows).abs().max()) < 0.03
    assert torch.equal(
        recomputation.encoded(sides, "int4")[0][:, :, 32:],
        recomputation.encoded((sides[0][:, :, 32:], sides[1][:, :, 32:]), "int4")[0],
    )
