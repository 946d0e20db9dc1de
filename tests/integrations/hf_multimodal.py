"""Tiny random models of transformers whose class also takes images."""

from __future__ import annotations

from typing import Any

import torch
from hf_models import _BASE, _HALF, MORE, register_exact

_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32}
_QWEN = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 64}
_QWEN |= {"hidden_size": 32, "out_hidden_size": 32}
# Frequencies of time, height and width, which turn alike where a token has one position.
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
MULTIMODAL: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "Gemma3TextConfig", {**_HALF, "head_dim": 16}, _VISION),
    "llava": ("LlavaConfig", "LlamaConfig", {}, _CLIP),
    "llava_next": ("LlavaNextConfig", "MistralConfig", {"sliding_window": 8}, _CLIP),
    "mistral3": ("Mistral3Config", "MistralConfig", {"sliding_window": None}, {**_VISION, "model_type": "pixtral"}),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLTextConfig", _MROPE, _QWEN),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLTextConfig", _MROPE, _QWEN),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLTextConfig",
        {**_MROPE, "head_dim": 8},
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
}
# Queries of Mistral-4 grow with their position, from the 16th on here.
_GROWING = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
_MOON = {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4}
# Their text parts have latent attention. Older releases of transformers have no kimi_k25.
LATENT: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "kimi_k25": ("Kimi_K25Config", "DeepseekV3Config", MORE["deepseek_v3"][1], _MOON),
    "mistral4": (
        "Mistral3Config",
        "Mistral4Config",
        {**MORE["deepseek_v3"][1], "rope_parameters": _GROWING},
        {**_VISION, "model_type": "pixtral"},
    ),
}


def multimodal_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny random model; its text part attends exactly, its tower as `eager` does."""
    import transformers

    transformers.logging.set_verbosity_error()
    register_exact()
    kind, text_kind, text, vision = {**MULTIMODAL, **LATENT}[name]
    text_config = getattr(transformers, text_kind)(**{**_BASE, **text}).to_dict()
    config = getattr(transformers, kind)(text_config=text_config, vision_config=vision, tie_word_embeddings=False)
    config.mm_tokens_per_image = 4  # of Gemma-3
    for part in (config, config.text_config):
        part._experts_implementation = "eager"  # grouped matrix products have no float64
    config.image_token_id = 32_000  # no token of these small vocabularies, as Mistral-3's is
    torch.manual_seed(0)
    attention = {"": "exact", "text_config": "exact", "vision_config": "eager"}
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("bias" not in key), std=0.2)
    return model.to(dtype).eval()
