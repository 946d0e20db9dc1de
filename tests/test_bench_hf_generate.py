"""`python -m bench.hf_generate` on a CPU: a tiny model, from the command line to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedattn.bench import hf_generate, hf_throughput


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny case is for machines without a GPU")
def test_a_run_from_the_command_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hf_generate.SHAPES, "one layer", {**hf_generate.SHAPES["tiny"], "num_hidden_layers": 1})
    file = tmp_path / "hf.json"
    arguments = ["--json", str(file), "--batch", "3", "--prompts", "4", "90", "--tokens", "5", "--runs", "1"]
    assert hf_generate.main([*arguments, "--shape", "one layer"]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    row, total = content["rows"]
    assert content["meta"]["transformers"] and row["workload"] == "3 prompts of 4..90"
    assert row["shape"] == "one layer"
    assert row["same_rows"] == 3 and row["same_tokens"] == row["same_choices"] == 1.0
    assert 0 < row["logits_difference"] < row["logits_tolerance"] < row["logits_largest"]
    sdpa, paged = row["contenders"]["sdpa"], row["contenders"]["pagedattn"]
    assert all(one["decode_ms"] > 0 and one["prefill_ms"] > 0 for one in (sdpa, paged))
    per_token = 1 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, bytes
    assert sdpa["cache_bytes"] == 3 * 94 * per_token
    # The last token is never run: 8, 51 and 94 tokens in blocks of 16, and the null block.
    assert paged["cache_bytes"] == (1 + 4 + 6 + 1) * 16 * per_token
    assert row["cache_bytes_ratio"] == round(sdpa["cache_bytes"] / paged["cache_bytes"], 3) > 1.4
    ways = ["generate, default cache", "generate, hf.enable", "generate_batch, paged|sdpa", "engine"]
    assert [*total["contenders"]] == ways and (total["prompts"], total["tokens"]) == (3, 5)
    assert all(one["same_rows"] == 3 and one["tok_s"] > 0 for one in total["contenders"].values())
    out = capsys.readouterr().out
    assert "sdpa over pagedattn: " in out and "3 rows have the same tokens throughout" in out


def test_a_shape_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        hf_generate.main(["--shape", "7b"])
    assert caught.value.code == 2 and "argument --shape: invalid choice: '7b'" in capsys.readouterr().err


def test_prompts_are_ragged_and_padded_on_the_left() -> None:
    inputs = hf_generate.ragged(5, 3, 11, 100)
    mask = inputs["attention_mask"].cpu()
    assert sorted(mask.sum(1).tolist()) == [3, 5, 7, 9, 11] and bool(mask[:, -1].all())
    assert bool((mask.diff(dim=1) >= 0).all()) and bool(((inputs["input_ids"].cpu() == 0) == (mask == 0)).all())


def test_agreement_counts_rows_and_what_comes_before_the_first_difference() -> None:
    found = hf_throughput.agreement([[1, 2, 3, 4], [1, 9, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert found == {"same_rows": 1, "same_prefix": 0.625}
    with pytest.raises(ValueError, match=r"expected 1 rows of 2 tokens, got \[3\]"):
        hf_throughput.agreement([[1, 2, 3]], [[1, 2]])
