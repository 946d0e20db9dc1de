"""ModelConfig: what a `config.json` says about a dense decoder, with the defaults of transformers 5 per model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedattn.errors import InvalidInputError, SecurityError, UnsupportedError

from .folder import ModelFolder
from .rope import RopeConfig
from .text_part import text_config

_MAX_LAYERS = 4096
_MAX_SIZE = 1 << 24
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What a model type fixes: its class name on the hub and the defaults of keys that a config may leave out."""

    architecture: str
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size // num_attention_heads
    qk_norm: bool = False
    qkv_bias: bool = False  # always, whatever the config says
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False


FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily("LlamaForCausalLM", None, None, reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": ModelFamily("MistralForCausalLM", 8, None),
    "qwen2": ModelFamily("Qwen2ForCausalLM", 32, None, qkv_bias=True),
    "qwen3": ModelFamily("Qwen3ForCausalLM", 32, 128, qk_norm=True, reads_attention_bias=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one dense decoder. `sliding_windows` has each layer's window in tokens, None where it is full."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype  # what `dtype="auto"` means: the config's, float32 where it names none
    eos_token_ids: tuple[int, ...]  # of generation_config.json, else config.json; empty where neither names one


def load_model_config(folder: ModelFolder) -> ModelConfig:
    """Read `config.json` and `generation_config.json` of a folder as plain data.

    Raises:
        WeightsError: no config.json, or no JSON in it.
        SecurityError: `auto_map` asks for code of the folder to be imported.
        UnsupportedError: a model type, activation, rope, or quantisation that this engine does not have.
        InvalidInputError: a value of the wrong type or out of range.
    """
    raw = folder.require_json("config.json")
    generation = folder.read_json("generation_config.json") or {}
    return parse_model_config(text_config(raw), generation)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """As `load_model_config`, from the parsed JSON objects."""
    family = _family(raw)
    heads = _size(raw, "num_attention_heads")
    hidden = _size(raw, "hidden_size")
    kv_heads = _size(raw, "num_key_value_heads", family.num_kv_heads or heads, none=heads)
    if heads % kv_heads:
        raise InvalidInputError("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    head_dim = _size(raw, "head_dim", family.head_dim or hidden // heads, none=hidden // heads)
    if head_dim % 2:
        raise InvalidInputError("head_dim", "an even number (rotary embedding turns pairs)", head_dim)
    layers = _size(raw, "num_hidden_layers", limit=_MAX_LAYERS)
    positions = _size(raw, "max_position_embeddings")
    attention_bias = family.reads_attention_bias and _flag(raw, "attention_bias")
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope=RopeConfig.from_model_config(raw, positions),
        sliding_windows=_sliding_windows(raw, layers),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and _flag(raw, "mlp_bias"),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        max_position_embeddings=positions,
        dtype=read_dtype(raw),
        eos_token_ids=read_eos_token_ids(generation or {}) or read_eos_token_ids(raw),
    )


def _family(raw: Mapping[str, Any]) -> ModelFamily:
    if raw.get("auto_map"):
        raise SecurityError("config.json has `auto_map`, which imports code of the model folder; remove it to load")
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    named = raw.get("architectures")
    if named and family.architecture not in named:
        raise UnsupportedError(f"architectures {named} is not supported; for {model_type} it is {family.architecture}")
    refuse_quantised_weights(raw)
    if not raw.get("is_causal", True):
        raise UnsupportedError("`is_causal` is not true: an engine decodes causal models only")
    if raw.get("per_layer_config"):
        raise UnsupportedError("`per_layer_config` (layers that differ) is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; supported: silu")
    return family


def _sliding_windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Which layers are windowed differs by type: never (llama), always (mistral), or by layer (qwen)."""
    model_type = raw["model_type"]
    if model_type == "llama":
        return (None,) * layers
    used = model_type == "mistral" or _flag(raw, "use_sliding_window")
    window = _size(raw, "sliding_window", 4096, none=0) if used else 0
    kinds = raw.get("layer_types")
    if kinds is None:
        first = 0 if model_type == "mistral" else _size(raw, "max_window_layers", 28, low=0)
        return tuple(window if window and layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InvalidInputError("layer_types", f"a list of {layers} names", kinds)
    unknown = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedError(f"layer_types {sorted(unknown)} are not supported")
    if not window and "sliding_attention" in kinds:
        raise InvalidInputError("sliding_window", "set, since layer_types has sliding_attention", "none")
    if window and model_type == "mistral" and "full_attention" in kinds:
        raise UnsupportedError("mistral with windowed and full layers mixed is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _size(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    none: int | None = None,
    low: int = 1,
    limit: int = _MAX_SIZE,
) -> int:
    """An integer of the config: `default` where the key is missing, `none` where it is null."""
    value = raw.get(key, default)
    if value is None and key in raw and none is not None:
        return none
    if type(value) is not int or not low <= value <= limit:
        raise InvalidInputError(f"{key} in config.json", f"an integer from {low} to {limit}", repr(value))
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InvalidInputError(f"{key} in config.json", "a positive finite number", repr(value))
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if type(value) is not bool:
        raise InvalidInputError(f"{key} in config.json", "true or false", repr(value))
    return value


def refuse_quantised_weights(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for weights that are quantised; a scheme of the KV cache alone only brings scales."""
    given = raw.get("quantization_config")
    cache_only = isinstance(given, dict) and given.get("kv_cache_scheme") and not given.get("config_groups", True)
    if given and not cache_only:
        raise UnsupportedError("quantised weights (`quantization_config`) are not supported; use the original model")


def read_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, float32 where it names none."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedError(f"dtype {name!r} in config.json is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def read_eos_token_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a config.json or generation_config.json; empty where it names none."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise InvalidInputError("eos_token_id", "a non-negative integer or a list of them", repr(value))
    return tuple(dict.fromkeys(ids))
