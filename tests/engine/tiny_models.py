"""Tiny random models in Hugging Face format: transformers builds and saves them, the engine loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_GEMMA3 = ["sliding_attention"] * 3 + ["full_attention"]  # kinds in an uneven ratio: three groups share its window

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "llama3": ("LlamaConfig", {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "yarn": ("LlamaConfig", {"head_dim": 16, "rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 8}),
    "qwen2-mostly-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "layer_types": _GEMMA3}),
    "qwen2-half-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
}


def hf_config(name: str, **changes: Any) -> Any:
    """The transformers config of a tiny model."""
    import transformers

    kind, extra = MODELS[name]
    options = {**_BASE, **extra, **changes}
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][: options["num_hidden_layers"]]
    return getattr(transformers, kind)(**options)


def hf_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny random model of transformers with eager attention; weights are drawn in float32 from a fixed seed."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(name, **changes), attn_implementation="eager", dtype=torch.float32
    )
    for parameter_name, parameter in model.named_parameters():
        # a fresh model has zero biases and norms of one, which would hide a forgotten bias or weight
        if parameter_name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    return model.to(dtype).eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model of transformers without its progress bar; returns the folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder
