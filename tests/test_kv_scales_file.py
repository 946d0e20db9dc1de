"""The file of a calibration: what is written is read, scales are of the format, and what is wrong is named."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import Attention, KVScales, LayerMaxima
from pagedattn.errors import InvalidInputError
from pagedattn.formats.fp8.fingerprint import fingerprint

LAYERS = (LayerMaxima((448.0, 0.0), (1e-43, 3.5), 64, 64), LayerMaxima((1.5, 2.5), (57344.0, 1.0), 32, 16))
SCALES = KVScales(LAYERS, 1000, {"model.safetensors": "ab"}, "0.2.0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SCALES.save(tmp_path / "kv_scales.json")
    return tmp_path / "kv_scales.json"


def test_what_is_written_is_read(path: Path) -> None:
    read = KVScales.load(path)
    assert (read.layers, read.num_tokens, read.checkpoint, read.version, read.source) == (
        *(LAYERS, 1000, {"model.safetensors": "ab"}, "0.2.0"),
        str(path),
    )
    assert os.listdir(path.parent) == ["kv_scales.json"]


def test_one_file_serves_both_formats() -> None:
    for name, most in (("fp8", 448.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        (key, value), (_, other) = SCALES.scales(name)
        assert key.tolist() == [pytest.approx(448.0 / most), 1.0]  # a head of zeros
        assert value.tolist() == [torch.finfo(torch.float32).tiny, pytest.approx(3.5 / most)]
        assert other.tolist() == [pytest.approx(57344.0 / most), pytest.approx(1.0 / most)]
        assert key.dtype == torch.float32
    with pytest.raises(InvalidInputError, match="kv_scales must be None for kv_cache_dtype='int8'"):
        SCALES.scales("int8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"schema_version": 2},
            r"kv_scales must be of schema_version 1, got 2 in .*kv_scales.json; run `pagedattn cal",
        ),
        ({"schema_version": None}, "schema_version 1, got None"),
        ({"layers": []}, "layers of kv_scales .* must be a list, not empty, got"),
        ({"num_layers": 3}, "num_layers of kv_scales .* must be 2, as many as there are layers, got 3"),
        ({"num_tokens": 0}, "num_tokens of kv_scales .* must be a positive integer, got 0"),
        ({"pagedattn_version": None}, "pagedattn_version of kv_scales .* must be a string, got None"),
        ({"checkpoint": {}}, "checkpoint of kv_scales .* must be fingerprints by file name"),
        ({"checkpoint": {"../model.safetensors": "ab"}}, "must be fingerprints by file name"),
        ({"checkpoint": {"/model.safetensors": "ab"}}, "must be fingerprints by file name"),
        ({"checkpoint": {"model.safetensors": 3}}, "must be fingerprints by file name"),
    ],
)
def test_a_wrong_entry_is_named(path: Path, change: dict[str, Any], said: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=said):
        KVScales.load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"key_max": [1.0, math.nan]},
            r"layers\[1\].key_max\[1\] .* must be a finite number of at least 0, got nan; run",
        ),
        ({"value_max": [-1.0, 1.0]}, r"value_max\[0\] .* at least 0, got -1.0"),
        ({"value_max": [math.inf, 1.0]}, r"value_max\[0\] .* at least 0, got inf"),
        ({"value_max": [1e300, 1.0]}, r"value_max\[0\] .* at least 0, got 1e\+300"),
        ({"value_max": [True, 1.0]}, r"value_max\[0\] .* at least 0, got True"),
        ({"key_max": ["1", 1.0]}, r"key_max\[0\] .* at least 0, got '1'"),
        ({"key_max": [1.0]}, r"key_max .* must be 2 numbers, one per KV head, got \[1.0\]"),
        ({"key_max": None}, "key_max .* must be 2 numbers, one per KV head, got None"),
        ({"head_dim": 0}, r"layers\[1\].head_dim .* must be a positive integer, got 0"),
    ],
)
def test_a_wrong_number_is_named(path: Path, change: dict[str, Any], said: str) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["layers"][1] |= change
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=said):
        KVScales.load(path)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    pipe, cut, other = tmp_path / "pipe", tmp_path / "cut", tmp_path / "other"
    os.mkfifo(pipe)
    cut.write_text('{"schema_version": 1, "lay', encoding="utf-8")
    other.write_text("[1]", encoding="utf-8")
    for path, said in (
        *((tmp_path / "none", "no file"), (tmp_path, "no file"), (pipe, "no file")),
        *((cut, "no JSON: .*"), (other, "list")),
    ):
        with pytest.raises(InvalidInputError, match=rf"`pagedattn calibrate`, got {path} \({said}\); run"):
            KVScales.load(path)
    with pytest.raises(InvalidInputError, match="kv_scales must be the path of a file, got int"):
        KVScales.load(3)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        SCALES.save(tmp_path / "taken")
    assert os.listdir(tmp_path) == ["taken"]


def test_a_fingerprint_tells_files_apart(tmp_path: Path) -> None:
    header = b'{"a": 1}'
    data = bytearray(len(header).to_bytes(8, "little") + header + bytes(5 << 20))
    seen = set()
    for change in (None, 10, 16, 40_000, (2 << 20) + 70_000, len(data) - 1):
        changed = bytearray(data)
        if change is not None:
            changed[change] ^= 1
        (tmp_path / "one").write_bytes(changed)
        seen.add(fingerprint(tmp_path / "one"))
    for cut in (data[:-1], data[:40], data[:3], b""):
        (tmp_path / "one").write_bytes(cut)
        seen.add(fingerprint(tmp_path / "one"))
    assert len(seen) >= 9  # a changed byte between two samples is not seen
    (tmp_path / "one").write_bytes(data)
    assert fingerprint(tmp_path / "one") in seen


def test_a_layer_takes_scales_after_it_was_built() -> None:
    layer = Attention(4, 64, 2, kv_cache_dtype="fp8")
    assert layer.kv_scales == (None, None)
    layer.set_kv_scales(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0]), "a calibration")
    assert [one.tolist() for one in layer.kv_scales if isinstance(one, torch.Tensor)] == [[0.5, 2.0], [1.0, 3.0]]
    assert layer.spec.kv_scale == "head" and "a calibration" in layer.selection.describe()
    with pytest.raises(InvalidInputError, match="given for fp8 caches only"):
        Attention(4, 64, 2).set_kv_scales(0.5, 0.5, "a calibration")
    with pytest.raises(InvalidInputError, match="1 or 2 elements"):
        layer.set_kv_scales(torch.ones(3), torch.ones(3), "a calibration")
