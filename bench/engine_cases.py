"""Workloads of the whole engine: models of random weights, and requests of random token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from pagedattn.engine import SamplingParams

Requests = tuple[list[list[int]], list[SamplingParams]]

QWEN3_06B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
TINY: Mapping[str, Any] = {
    **QWEN3_06B,
    **{"vocab_size": 12000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "dtype": "float32"},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512},
}
DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    **{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400},
    **{"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "first_k_dense_replace": 1},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu"},
    **{"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408},
    **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    **{"routed_scaling_factor": 1.0, "moe_layer_freq": 1, "attention_bias": False, "tie_word_embeddings": False},
    **{"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "bos_token_id": 100000, "eos_token_id": 100001},
    "rope_theta": 10000.0,
    "rope_scaling": {
        **{"type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        "original_max_position_embeddings": 4096,
    },
    "dtype": "bfloat16",
}
TINY_DEEPSEEK: Mapping[str, Any] = {
    **DEEPSEEK_V2_LITE,
    **{"vocab_size": 12000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "dtype": "float32"},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2},
    "rope_scaling": None,
}


@dataclass(frozen=True)
class EngineCase:
    """A model, the engine's options, and what it is asked."""

    name: str
    model: str
    shape: Mapping[str, Any] = field(repr=False)
    requests: Callable[[], Requests] = field(repr=False)
    options: Mapping[str, Any]

    def over(self, kv_cache_dtype: str) -> EngineCase:
        """The same over a cache of a format, which its name says."""
        options = {**self.options, "kv_cache_dtype": kv_cache_dtype}
        return replace(self, name=f"{self.name}, {kv_cache_dtype}", options=options)

    def write(self, folder: Path) -> Path:
        """The model's folder: a config, no weights and no tokenizer."""
        (folder / "config.json").write_text(json.dumps(dict(self.shape)), encoding="utf-8")
        return folder


def common(count: int = 256, longest: int = 1024, seed: int = 0) -> Requests:
    """What nano-vllm's bench.py asks: 142,827 prompt and 133,966 output tokens where all is as it is there."""
    draw = Random(seed)
    shortest = min(100, longest)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return prompts, [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(shortest, longest))
        for _ in range(count)
    ]


def penalties(count: int = 256, longest: int = 1024) -> Requests:
    """The common workload, with every penalty in every request."""
    prompts, params = common(count, longest)
    settings: dict[str, float] = {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    return prompts, [replace(one, **settings) for one in params]


def shared(count: int = 512, prefix: int = 2048, own: int = 128, tokens: int = 128) -> Requests:
    """Prompts that begin alike, such as with one system prompt."""
    draw = Random(0)
    begin = [draw.randint(0, 10000) for _ in range(prefix)]
    prompts = [begin + [draw.randint(0, 10000) for _ in range(own)] for _ in range(count)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, seed=0, max_tokens=tokens)] * count


def equal(count: int, prompt: int, tokens: int, temperature: float = 0.0) -> Requests:
    """Requests of one size."""
    draw = Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(prompt)] for _ in range(count)]
    return prompts, [SamplingParams(temperature=temperature, ignore_eos=True, seed=0, max_tokens=tokens)] * count


def engine_cases(gpus: int) -> list[EngineCase]:
    """The table for this number of GPUs; without one, tiny ones of the same kinds."""
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    if not gpus:
        small: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_kv_blocks": 200}
        graphs = {**small, "graph_sizes": [1, 2, 4, 8], "overlap": True}
        return [
            EngineCase("common", "tiny", TINY, lambda: common(12, 40), graphs),
            EngineCase("penalties", "tiny", TINY, lambda: penalties(12, 40), graphs),
            EngineCase("shared", "tiny", TINY, lambda: shared(10, 64, 8, 6), graphs),
            EngineCase("preempt", "tiny", TINY, lambda: common(12, 40), {**graphs, "num_kv_blocks": 24}),
            EngineCase("latency", "tiny", TINY, lambda: equal(1, 20, 12), small),
            EngineCase("two ranks", "tiny", TINY, lambda: common(12, 40), {**small, **two}),
        ]
    usual: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256}
    scarce: dict[str, Any] = {"num_kv_blocks": 4000}  # of the 10,000 that all requests fill at their ends
    small_model = ("Qwen3-0.6B", QWEN3_06B)
    return [
        EngineCase("common", *small_model, common, usual),
        EngineCase("common, int8", *small_model, common, {**usual, "kv_cache_dtype": "int8"}),
        EngineCase("common, fp8", *small_model, common, {**usual, "kv_cache_dtype": "fp8"}),
        EngineCase("common, k8v4", *small_model, common, {**usual, "kv_cache_dtype": "k8v4"}),
        EngineCase("common, int4", *small_model, common, {**usual, "kv_cache_dtype": "int4"}),
        EngineCase("common, serial", *small_model, common, {**usual, "overlap": False}),
        EngineCase("common, eager", *small_model, common, {**usual, "enforce_eager": True}),
        EngineCase("penalties", *small_model, penalties, usual),
        EngineCase("shared", *small_model, shared, {**usual, "max_num_seqs": 512}),
        EngineCase("preempt, recompute", *small_model, common, {**usual, **scarce, "preemption": "recompute"}),
        EngineCase("preempt, swap", *small_model, common, {**usual, **scarce, "preemption": "swap"}),
        EngineCase("latency", *small_model, lambda: equal(1, 128, 512), usual),
        EngineCase("8B", "Llama-8B", LLAMA_8B, common, usual),
        *[EngineCase("8B, two ranks", "Llama-8B", LLAMA_8B, common, {**usual, **two})] * (gpus > 1),
    ]
