"""More tiny models of transformers for its own `generate`: with those of `hf_models`, over twenty families."""

from __future__ import annotations

from typing import Any

import torch
from hf_models import _BASE, _HALF, _MOE, MODELS, MORE, build, hf_model, prompts

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "olmo3": ("Olmo3Config", _HALF),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "phi": ("PhiConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "exaone4": ("Exaone4Config", _HALF),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granitemoe": ("GraniteMoeConfig", _MOE),
    "deepseek_v2": ("DeepseekV2Config", MORE["deepseek_v3"][1]),
    "cohere": ("CohereConfig", {}),
    "granite_swa": ("GraniteSWAConfig", {**_HALF, "attention_multiplier": 0.3}),  # sinks
    "gpt_bigcode": ("GPTBigCodeConfig", {}),  # one key head
    # Layers whose keys have other shapes than those of the others.
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_HALF,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
}
ALL = [*MODELS, *MORE, *FAMILIES]


def model_of(name: str, dtype: torch.dtype = torch.float64, attention: str = "exact", **changes: Any) -> Any:
    """A tiny model of any family; `exact` is eager attention whose softmax keeps float64, which masks with it."""
    if name not in FAMILIES:
        return hf_model(name, dtype, attention, **changes)
    import transformers

    kind, extra = FAMILIES[name]
    return build(getattr(transformers, kind)(**{**_BASE, **extra, **changes}), dtype, attention)


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left."""
    longest, tokens = max(lengths), prompts(*lengths)
    ids = [[0] * (longest - len(one)) + one for one in tokens]
    mask = [[0] * (longest - len(one)) + [1] * len(one) for one in tokens]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Tokens of `generate`, greedy and without an end unless asked for otherwise."""
    defaults = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    out = model.generate(**inputs, **{**defaults, **options})
    return out if isinstance(out, torch.Tensor) else out.sequences
