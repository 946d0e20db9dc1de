"""`pagedattn calibrate`, and `--kv-scales` of what it has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedattn import KVScales
from pagedattn.cli import command as cli

MODEL = Path(__file__).parent.parent / "examples" / "tiny-qwen3"
TEXT = str(MODEL / "corpus.txt")


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    return out, err


def test_a_file_is_written_that_an_fp8_cache_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("calibrate", str(MODEL), TEXT, "--device", "cpu", "--max-tokens", "600")
    out, err = run(capsys, *given)
    scales = KVScales.load("kv_scales.json")
    assert scales.num_tokens == 600 and len(scales.layers) == 4
    largest = max(max(layer.key) for layer in scales.layers)
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [first for first, _ in lines] == ["tokens", "largest", "largest", "written"] and not err
    assert lines[1][1].startswith(f"key    {largest:.4g} (layer ") and lines[3][1].split()[-1] == "kv_scales.json"
    told = json.loads(run(capsys, *given, "--json", "--output", "other.json", "--dtype", "fp32")[0])
    assert told["output"] == "other.json" and told["tokens"] == 600 and told["model"] == str(MODEL)
    assert told["largest_key"]["maximum"] == pytest.approx(largest, rel=0.02)
    assert set(told["largest_value"]) == {"maximum", "layer", "head"}
    few = ("generate", str(MODEL), "A block table", "--device", "cpu", "--max-tokens", "8")
    exact = run(capsys, *few)[0]
    assert run(capsys, *few, "--kv-cache-dtype", "fp8", "--kv-scales", "kv_scales.json")[0] == exact
    _, err = run(capsys, *few, "--kv-cache-dtype", "int8", "--kv-scales", "kv_scales.json", status=2)
    assert err.startswith("pagedattn: kv_scales must be None for kv_cache_dtype='int8', which takes no scales")


def test_what_cannot_be_read_or_written_is_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    for given, said in (
        ((str(tmp_path / "none.txt"),), "none.txt cannot be read: No such file"),
        ((str(MODEL / "model.safetensors"),), "model.safetensors cannot be read: "),
        ((str(empty),), "empty.txt must hold text, it is empty"),
        ((TEXT, "--output", str(tmp_path / "none" / "a.json")), "--output must be in a folder that exists, got"),
        ((TEXT, "--max-tokens", "0"), "max_tokens must be a positive integer, got 0"),
    ):
        out, err = run(capsys, "calibrate", str(MODEL), *given, status=2)
        assert not out and err.startswith("pagedattn: ") and said in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt"]
