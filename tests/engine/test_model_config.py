"""ModelConfig reads what transformers reads, and refuses the rest by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, hf_config

from pagedattn.engine.models.config import load_model_config, parse_model_config
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.errors import InvalidInputError, UnsupportedError, WeightsError

BASE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def parse(**changes: Any) -> Any:
    raw = {**BASE, **changes}
    return parse_model_config({key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize("name", MODELS)
def test_reads_what_transformers_saves(name: str, tmp_path: Path) -> None:
    theirs = hf_config(name)
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(ModelFolder(tmp_path))
    assert ours.model_type == theirs.model_type
    assert (ours.num_heads, ours.num_kv_heads, ours.num_layers) == (4, 2, 4)
    assert ours.head_dim == (32 if name == "qwen3" else 16)
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.eos_token_ids == (2,)
    windows = {
        "mistral": (8,) * 4,
        "qwen2-half-window": (None, None, 8, 8),
        "qwen2-mostly-window": (8, 8, 8, None),
    }
    assert ours.sliding_windows == windows.get(name, (None,) * 4)


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim"), [("llama", 32, 2), ("mistral", 8, 2), ("qwen2", 32, 2), ("qwen3", 32, 128)]
)
def test_defaults_of_keys_left_out_are_those_of_transformers(model_type: str, kv_heads: int, head_dim: int) -> None:
    from transformers import AutoConfig

    changes = {"model_type": model_type, "num_key_value_heads": ..., "num_attention_heads": 32}
    ours = parse(**changes)
    theirs = AutoConfig.for_model(model_type, hidden_size=64, num_attention_heads=32)
    assert (ours.num_kv_heads, ours.head_dim) == (kv_heads, head_dim)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert set(ours.sliding_windows) == {4096 if model_type == "mistral" else None}


@pytest.mark.parametrize(
    ("model_type", "changes", "biases"),
    [
        ("qwen2", {}, (True, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
    ],
)
def test_biases_by_type(model_type: str, changes: dict[str, Any], biases: tuple[bool, ...]) -> None:
    config = parse(model_type=model_type, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


def test_windows_by_type() -> None:
    window = {"sliding_window": 7, "max_window_layers": 1}
    assert parse(**window).sliding_windows == (None,) * 4
    assert parse(**window, use_sliding_window=True).sliding_windows == (None, 7, 7, 7)
    assert parse(model_type="llama", **window, use_sliding_window=True).sliding_windows == (None,) * 4
    assert parse(model_type="mistral", **window).sliding_windows == (7,) * 4
    assert parse(model_type="mistral", sliding_window=None).sliding_windows == (None,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = parse(**window, use_sliding_window=True, layer_types=kinds)
    assert mixed.sliding_windows == (7, None, 7, None)
    with pytest.raises(InvalidInputError, match="sliding_window"):
        parse(layer_types=kinds)
    with pytest.raises(UnsupportedError, match="mistral"):
        parse(model_type="mistral", sliding_window=7, layer_types=kinds)


def test_old_and_new_rope_keys_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert old.rope.theta == 5e5
    assert old.rope.original_max_positions == 64
    assert parse(rope_theta=7e4, rope_scaling=None).rope.theta == 7e4


def test_eos_ids_come_from_the_generation_config_first() -> None:
    raw = {**BASE, "eos_token_id": 5}
    assert parse_model_config(raw, {"eos_token_id": [7, 6, 7]}).eos_token_ids == (7, 6)
    assert parse_model_config(raw, {}).eos_token_ids == (5,)
    assert parse_model_config(BASE, {}).eos_token_ids == ()
    with pytest.raises(InvalidInputError, match="eos_token_id"):
        parse_model_config(BASE, {"eos_token_id": ["x"]})


def test_dtype() -> None:
    assert parse().dtype == torch.float32
    assert parse(torch_dtype="float16").dtype == torch.float16
    assert parse(dtype="bfloat16", torch_dtype="float16").dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="int8"):
        parse(dtype="int8")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gpt2"}, "supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 1e-3}}}, "per_layer_config"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        parse(**changes)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_size", ..., "hidden_size"),
        ("hidden_size", 0, "hidden_size"),
        ("hidden_size", "64", "hidden_size"),
        ("hidden_size", True, "hidden_size"),
        ("hidden_size", 10**12, "hidden_size"),
        ("num_hidden_layers", 10**9, "num_hidden_layers"),
        ("num_attention_heads", 3, "num_key_value_heads"),
        ("head_dim", 15, "head_dim"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps"),
        ("tie_word_embeddings", "no", "tie_word_embeddings"),
        ("sliding_window", -1, "sliding_window"),
        ("layer_types", ["full_attention"], "layer_types"),
        ("rope_theta", 1, "rope_theta"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 0}, "factor"),
        ("rope_parameters", {**LLAMA3, "high_freq_factor": 1}, "high_freq_factor"),
        ("rope_parameters", {**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: object, named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        parse(**{key: value}, use_sliding_window=True)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"a": "\\ud8'])
def test_broken_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(WeightsError, match=r"config\.json"):
        load_model_config(ModelFolder(tmp_path))


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"^{re.escape(str(tmp_path / 'config.json'))} is missing"):
        load_model_config(ModelFolder(tmp_path))
    with pytest.raises(WeightsError, match="local folder"):
        ModelFolder(tmp_path / "nothing")


def test_generation_config_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}', encoding="utf-8")
    assert load_model_config(ModelFolder(tmp_path)).eos_token_ids == (151645, 151643)
