"""`python -m bench.accuracy` on a CPU: the trained tiny model, whose text an int8 cache does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedattn.bench import accuracy

MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"


def test_rows_of_two_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "accuracy.json"
    text.write_text((MODEL / "corpus.txt").read_text(encoding="utf-8")[:900], encoding="utf-8")
    arguments = [
        str(MODEL),
        "--formats",
        "int8",
        "fp8_e5m2",
        "--tokens",
        "40",
        "--text",
        str(text),
        "--json",
        str(file),
    ]
    assert accuracy.main([*arguments, "--chunk", "16", "--device", "cpu", "--dtype", "float32"]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["meta"]["model"] == "tiny-qwen3" and len(content["rows"]) == 2 + 2 * len(accuracy.FACTS)
    int8, e5m2 = (
        row for name in ("int8", "fp8_e5m2") for row in content["rows"] if row["kv_cache_dtype"] == name and "kl" in row
    )
    assert int8["positions"] == e5m2["positions"] == 39 and int8["positions_below"] == 512
    assert 0 < int8["kl"] < e5m2["kl"] < 0.05 and int8["top1"] >= 0.9
    assert all(row["delta_nll_error"] > 0 for row in (int8, e5m2))
    assert all(row["share_in_16_bit"] == 0 for row in content["rows"])
    facts = [row for row in content["rows"] if "fact_at" in row]
    assert {row["fact_at"] for row in facts} == {0.05, 0.5, 0.95} and any(row["delta_nll"] for row in facts)
    assert "standard error" in capsys.readouterr().out


def test_sums_become_means() -> None:
    row = accuracy._average("int8", 512, {"n": 4, "delta": 2.0, "square": 3.0, "kl": 0.4, "same": 3.0})
    assert (row["delta_nll"], row["kl"], row["top1"]) == (0.5, 0.1, 0.75)
    assert row["delta_nll_error"] == pytest.approx((0.75 - 0.25) ** 0.5 / 2, abs=1e-6)


def test_rows_say_how_many_keys_are_read_in_16_bit() -> None:
    """Positions 0 to 31 read all of their keys so, over int4 the others those of their own block of 32 alone."""
    transformers = accuracy.hf.import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    windowed = "turboquant4:window=32:first=1"
    models = accuracy.enabled(model, ["auto", "int4", windowed, "int8:skip=0"], None)
    rows = {row["kv_cache_dtype"]: row for row in accuracy.losses(models, torch.arange(5, 102), 32)}
    assert {row["positions"] for row in rows.values()} == {96} and models["int4"].config.num_hidden_layers == 4
    keys, own = 96 * 97 / 2, 3 * 32 * 33 / 2
    shares = {"int4": own / keys, windowed: 1.0, "int8:skip=0": 1 / 4}
    assert {name: row["share_in_16_bit"] for name, row in rows.items()} == pytest.approx(shares, abs=1e-5)
    at = accuracy.share_in_16_bit(models["int4"], windowed, 128, 2)
    assert at["share_in_16_bit"] == pytest.approx((65 + 66) / (129 + 130), abs=1e-5)


def test_documents_are_there_without_files() -> None:
    found = dict(accuracy.documents([]))
    assert set(found) == set(accuracy.TOPICS) and all(len(text) > 30_000 for text in found.values())


def test_a_cache_of_each_format_under_the_same_weights() -> None:
    transformers = accuracy.hf.import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    models = accuracy.enabled(model, ["auto", "int8"], None)
    first, second = (list(one.parameters()) for one in models.values())
    assert all(a is b for a, b in zip(first, second, strict=True))
    ((_, logits), *_) = accuracy.logits_of(models, accuracy.new_caches(models), torch.arange(5, 15), 32)
    assert 0 < float((logits["auto"] - logits["int8"]).abs().max()) < 0.5


def test_token_by_token_is_what_chunks_are() -> None:
    """Decodes over stored entries, one token at a time, against chunks of the same text."""
    transformers = accuracy.hf.import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    models = accuracy.enabled(model, ["auto", "int8"], None)
    ids = torch.arange(5, 25)
    by_chunk = {
        chunk: [part for _, part in accuracy.logits_of(models, accuracy.new_caches(models), ids, chunk)]
        for chunk in (1, 8)
    }
    assert [len(parts) for parts in by_chunk.values()] == [20, 3]
    for name in models:
        single, many = (torch.cat([part[name] for part in parts]) for parts in by_chunk.values())
        torch.testing.assert_close(single, many, rtol=1e-4, atol=1e-4)
    (row,) = accuracy.losses(models, ids, 1)
    assert row["positions"] == 19 and row["kl"] > 0
