"""Weights: what is in the checkpoint is in the model, and a checkpoint that does not fit is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, hf_model, save

from pagedattn.engine.models.config import load_model_config
from pagedattn.engine.models.decoder import Decoder
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.engine.models.loader import load_weights
from pagedattn.errors import WeightsError

CPU = torch.device("cpu")


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_model_config(ModelFolder(folder))
    return Decoder(config, dtype=dtype, device="cpu", max_positions=64, block_size=16)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    model = empty_model(folder, dtype)
    load_weights(model, ModelFolder(folder), CPU, **options)
    return model


def refused(folder: Path, *words: str) -> None:
    """Loading must fail with a WeightsError that says all words, and leave the model as it was."""
    model = empty_model(folder)
    with pytest.raises(WeightsError) as caught:
        load_weights(model, ModelFolder(folder), CPU)
    for word in words:
        assert word in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(hf_model("qwen2", torch.float32, num_hidden_layers=2), tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def split_in_two(folder: Path) -> dict[str, str]:
    """Replace the checkpoint by two shards and an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in halves.items() for key in keys}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_arrives_where_it_belongs(name: str, tmp_path: Path) -> None:
    reference = hf_model(name, torch.float32, num_hidden_layers=2)
    model = load(save(reference, tmp_path))
    views = model.checkpoint_views(dict(model.named_parameters()))
    wanted = dict(reference.named_parameters())
    assert views.keys() == wanted.keys()
    assert len(views) > 20
    for key, tensor in wanted.items():
        assert torch.equal(views[key], tensor), key
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_shards_equal_one_file(tmp_path: Path) -> None:
    reference = hf_model("qwen3", torch.float32)
    whole = load(save(reference, tmp_path / "whole"))
    sharded = save(reference, tmp_path / "shards", max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    for name, tensor in load(sharded).named_parameters():
        assert torch.equal(tensor, whole.get_parameter(name)), name


def test_weights_are_converted_to_the_models_dtype(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({key: value.bfloat16() for key, value in tensors.items()}))
    model = load(folder, torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.norm.weight, stored.double())


def test_tied_embeddings(tmp_path: Path) -> None:
    reference = hf_model("qwen3", torch.float32, tie_word_embeddings=True)
    folder = save(reference, tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder)
    hidden = torch.randn(3, 64)
    assert torch.equal(model.logits(hidden), hidden @ reference.model.embed_tokens.weight.T)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    load(folder)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    refused(folder, "lm_head.weight", "tie_word_embeddings")


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def test_missing_unexpected_shape_and_type_name_the_tensor(folder: Path) -> None:
    original = (folder / "model.safetensors").read_bytes()
    key = "model.layers.1.self_attn.k_proj.bias"
    cases: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(key), "missing"),
        (lambda t: t.update({key + ".more": torch.ones(1)}), "unexpected"),
        (lambda t: t.update({key: torch.ones(33)}), "[33]"),
        (lambda t: t.update({key: torch.ones(1, 32)}), "[1, 32]"),
        (lambda t: t.update({key: torch.ones(32, dtype=torch.int32)}), "I32"),
        (lambda t: t.update({key: torch.ones(32).to(torch.float8_e4m3fn)}), "F8_E4M3"),
    ]
    for change, word in cases:
        rewrite(folder, change)
        refused(folder, key, word)
        (folder / "model.safetensors").write_bytes(original)
    load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    rewrite(folder, lambda t: [t.pop(key) for key in list(t) if "layers" in key])
    refused(folder, "missing", "and 16 more")


def test_index_faults_name_the_tensor(folder: Path) -> None:
    weight_map = split_in_two(folder)
    load(folder)
    first, last = min(weight_map), max(weight_map)
    write_index(folder, {**weight_map, first: "b.safetensors"})
    refused(folder, first)
    write_index(folder, {**weight_map, "model.ghost": "b.safetensors"})
    refused(folder, "model.ghost", "missing")
    write_index(folder, {key: file for key, file in weight_map.items() if key != last})
    refused(folder, last, "not listed")
    write_index(folder, {**weight_map, last: "c.safetensors"})
    refused(folder, "c.safetensors", "missing")
    tensors = load_file(folder / "b.safetensors")
    save_file({**tensors, first: torch.ones(1)}, folder / "b.safetensors")
    write_index(folder, weight_map)
    refused(folder, first, "twice")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}])
def test_an_index_without_a_map(weight_map: object, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    refused(folder, "weight_map")


def test_broken_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    faults = [
        b"",
        raw[:7],
        raw[: 8 + size // 2],
        raw[:-1],
        raw + b"\0",
        struct.pack("<Q", 2**63) + raw[8:],
        struct.pack("<Q", size + 10**9) + raw[8:],
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"{" * 100_000,
    ]
    for fault in faults:
        file.write_bytes(fault)
        refused(folder, "model.safetensors")
    file.write_bytes(raw)
    load(folder)


def test_a_header_that_names_a_tensor_twice(folder: Path) -> None:
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"model.norm.weight":{entry},"model.norm.weight":{entry}}}'.encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    refused(folder, "model.norm.weight", "twice")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "pytorch_model.bin", "convert")


def test_a_fault_while_streaming_leaves_no_half_built_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        calls.append(source)
        if len(calls) == 5:
            raise OSError("disk")
        return self

    model = empty_model(folder)
    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(OSError, match="disk"):
        load_weights(model, ModelFolder(folder), CPU)
    assert len(calls) == 5
    assert all(parameter.is_meta for parameter in model.parameters())


def test_dummy_weights_need_no_checkpoint_and_are_seeded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, same, other = (dict(load(folder, load_format="dummy", seed=s).named_parameters()) for s in (1, 1, 2))
    key = "layers.0.self_attn.qkv_proj.weight"
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first[key], other[key])
    assert 0.01 < first[key].std() < 0.03
    assert torch.equal(first["norm.weight"], torch.ones(64))
    assert torch.equal(first["layers.1.self_attn.qkv_proj.bias"], torch.zeros(128))
