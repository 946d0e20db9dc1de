"""Tiny random models of transformers, exact attention to compare with, and a packed run of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pagedattn import CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.integrations.transformers import PackedModel

VOCAB = 160
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Caps as small as the logits, a scale that is not head_dim ** -0.5, and windows that the prompts leave behind.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {
            **_HALF,
            "head_dim": 16,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**_HALF, "head_dim": 16, "query_pre_attn_scalar": 5}),
    "gpt_oss": ("GptOssConfig", {**_HALF, **_MOE, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**_MOE, "sliding_window": 8}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {"sliding_window": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
}
# Other families: learnt positions, logits that are scaled or projected, values of another size than the keys.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 16, "init_std": 0.3}),
    "cohere2": ("Cohere2Config", {**_HALF, "logit_scale": 0.5}),
    # A window that no layer tells its attention of, only its mask.
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 8},
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    # get_decoder gives its head.
    "modernbert-decoder": ("ModernBertDecoderConfig", {"local_attention": 16}),
    # They call the attention interface without the flag for it.
    "biogpt": ("BioGptConfig", {}),
    "stablelm": ("StableLmConfig", {"qk_layernorm": True, "use_qkv_bias": True}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),  # its layers, as those of stablelm, hand no keywords on
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 3.0}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
}


def hf_config(name: str, **changes: Any) -> Any:
    """The transformers config of a tiny model."""
    import transformers

    kind, extra = {**MODELS, **MORE}[name]
    return getattr(transformers, kind)(**{**_BASE, **extra, **changes})


def hf_model(name: str, dtype: torch.dtype = torch.float64, attention: str = "eager", **changes: Any) -> Any:
    """A tiny random model; every weight that a fresh model would leave at a constant is drawn too."""
    return build(hf_config(name, **changes), dtype, attention)


def build(config: Any, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    """A model of a config with weights from a fixed seed, drawn in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    register_exact()
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped matrix products have no float64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            mean = float("bias" not in name and "sinks" not in name)
            torch.nn.init.normal_(parameter, mean=mean, std=1.0 if "sinks" in name else 0.2)
    return model.to(dtype).eval()


def register_exact() -> None:
    """`attn_implementation="exact"`: eager attention whose softmax keeps the model's dtype (eager's is float32)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("exact", _exact)
    AttentionMaskInterface.register("exact", eager_mask)


def _exact(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.mT * scaling
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    logits = logits + attention_mask
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink.to(logits)), -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


@cache
def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def reference_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [T, vocab] of each sequence, run alone by transformers."""
    return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


@torch.inference_mode()
def packed_logits(
    model: PackedModel, sequences: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], block_size: int
) -> list[torch.Tensor]:
    """Logits [T, vocab] of each sequence; every step runs so many tokens of each, in one row, over shuffled blocks."""
    kv = PagedKVCache.from_specs(model.kv_cache_specs(block_size), 400)
    kv.slabs.fill_(255)  # NaN
    caches = [kv.layer(index) for index in range(kv.num_layers)]
    count, done, out = len(sequences), [0] * len(sequences), [[] for _ in sequences]
    free = iter(torch.randperm(399, generator=torch.Generator().manual_seed(2)).add(1).int().split(count * 20))
    tables = [next(free).view(count, 20) for _ in kv.groups]
    for sizes in steps:
        who = [i for i in range(count) if sizes[i]]
        counts, ends = [sizes[i] for i in who], [done[i] + sizes[i] for i in who]
        common_by_group = {
            group: CommonAttentionMetadata.from_lengths(
                counts, ends, table[who], block_size=kv.groups[group].spec.block_size
            )
            for group, table in enumerate(tables)
        }
        ids = torch.tensor([token for i in who for token in sequences[i][done[i] : done[i] + sizes[i]]])
        where = torch.cat([torch.arange(end - size, end) for size, end in zip(counts, ends, strict=True)])
        logits = model.logits(model(ids, where, caches, plan_step(model.attention_layers(), common_by_group)))
        for i, part in zip(who, logits.split(counts), strict=True):
            out[i].append(part)
            done[i] += sizes[i]
    return [torch.cat(parts) for parts in out]
