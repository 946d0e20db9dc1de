"""Layers that between them need every variant of TRITON's kernels on Hopper. Few: each compiles kernels of its own."""

from __future__ import annotations

from typing import Any

import torch

from pagedattn.testing.case import Case

FP16 = torch.float16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain without LSE": {"lse": False},
    "fp16, D64": {"dtype": FP16, "head_dim": 64},
    "D256, blocks of 32": {"head_dim": 256, "block_size": 32},
    "D256, fp16, group of 8": {"head_dim": 256, "dtype": FP16, "heads": (8, 1)},
    "blocks of 64, group of 5, sinks": {"block_size": 64, "heads": (10, 2), "sinks": 0.5},
    "blocks of 128, soft cap": {"block_size": 128, "softcap": 30.0},
    "blocks of 256, no LSE": {"block_size": 256, "lse": False},
    "HND, fp16": {"layout": "HND", "dtype": FP16},
    "HND, blocks of 32, one KV head": {"layout": "HND", "block_size": 32, "heads": (8, 1)},
    "one head": {"heads": (1, 1)},
    "a KV head per head": {"heads": (4, 4), "lse": False},
    "group of 6, sinks": {"heads": (12, 2), "sinks": 1.0},
    "group of 7, D64": {"heads": (14, 2), "head_dim": 64},
    "group of 64": {"heads": (64, 1)},
    "sinks and soft cap, fp16": {"sinks": 0.5, "softcap": 5.0, "dtype": FP16},
    "window of 1": {"sliding_window": 1},
    "window of 16, released, HND": {"sliding_window": 16, "poison_behind": True, "layout": "HND"},
    "window of 17, D64, group of 3": {"sliding_window": 17, "head_dim": 64, "lse": False, "heads": (9, 3)},
    "window of 129, released": {"sliding_window": 129, "poison_behind": True},
    "window of 1000, sinks, blocks of 64": {"sliding_window": 1000, "sinks": 1.0, "block_size": 64},
    "window, soft cap, sinks, fp16": {"sliding_window": 128, "softcap": 30.0, "sinks": 0.0, "dtype": FP16},
    "D96, group of 3": {"head_dim": 96, "heads": (6, 2)},
    "D80, fp16, HND, sinks": {"head_dim": 80, "dtype": FP16, "layout": "HND", "sinks": 0.5},
    "D72, window of 129, released": {"head_dim": 72, "sliding_window": 129, "poison_behind": True},
    "D112, group of 7, soft cap, blocks of 64": {"head_dim": 112, "heads": (14, 2), "softcap": 9.0, "block_size": 64},
    "D192 and 128": {"head_dim": 192, "head_dim_v": 128, "heads": (4, 4)},
    "D192, bidirectional, HND": {"head_dim": 192, "causal": False, "layout": "HND"},
    "D240 and 200, fp16": {"head_dim": 240, "head_dim_v": 200, "dtype": FP16},
    "D96 and 64": {"head_dim": 96, "head_dim_v": 64},
    "bidirectional": {"causal": False},
    "bidirectional window, fp16": {"causal": False, "sliding_window": 50, "dtype": FP16},
    "bidirectional, soft cap, D256": {"causal": False, "softcap": 5.0, "head_dim": 256},
}
# Attention over packed keys and values, without a cache.
PACKED: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, fp16, D64, bidirectional window, group of 7": {
        **{"dtype": FP16, "head_dim": 64, "causal": False, "sliding_window": 50, "heads": (14, 2)},
    },
    "packed, D96, soft cap, one KV head": {"head_dim": 96, "softcap": 9.0, "heads": (8, 1)},
    "packed, D192 and 128, sinks": {"head_dim": 192, "head_dim_v": 128, "heads": (4, 4), "sinks": 0.5},
    "packed, D256, bidirectional": {"head_dim": 256, "causal": False},
}
PACKED = {name: {**kind, "paged": False} for name, kind in PACKED.items()}
# Over quantised caches: each needs a decode kernel and one for prompts, by a copy where they are long.
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "int8, fp16, D64, window of 129, sinks": {
        **{"kv_cache_dtype": "int8", "dtype": FP16, "head_dim": 64, "sliding_window": 129, "sinks": 0.5},
    },
    "int8, D256, soft cap, HND": {"kv_cache_dtype": "int8", "head_dim": 256, "softcap": 5.0, "layout": "HND"},
    "k8v4": {"kv_cache_dtype": "k8v4"},
    "k8v4, fp16, D64, group of 8": {"kv_cache_dtype": "k8v4", "dtype": FP16, "head_dim": 64, "heads": (8, 1)},
    "k8v4, D256, bidirectional, blocks of 64": {
        **{"kv_cache_dtype": "k8v4", "head_dim": 256, "causal": False, "block_size": 64},
    },
    "k8v4, window of 1000, sinks": {"kv_cache_dtype": "k8v4", "sliding_window": 1000, "sinks": 1.0},
    "e4m3, scales of heads": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    "e4m3, fp16, D64, sinks": {"kv_cache_dtype": "fp8_e4m3", "dtype": FP16, "head_dim": 64, "sinks": 0.5},
    "e5m2, blocks of 128, a number as scale": {"kv_cache_dtype": "fp8_e5m2", "block_size": 128, "kv_scale": "float"},
    "turboquant4": {"kv_cache_dtype": "turboquant4"},
    "turboquant4, D256, soft cap, HND": {
        **{"kv_cache_dtype": "turboquant4", "head_dim": 256, "softcap": 5.0, "layout": "HND"},
    },
    "turboquant_k4v3, fp16, D64, window of 129, sinks": {
        **{"kv_cache_dtype": "turboquant_k4v3", "dtype": FP16, "head_dim": 64, "sliding_window": 129, "sinks": 0.5},
    },
    "turboquant_k3v4, bidirectional, blocks of 64": {
        **{"kv_cache_dtype": "turboquant_k3v4", "causal": False, "block_size": 64},
    },
    "turboquant2, group of 8": {"kv_cache_dtype": "turboquant2", "heads": (8, 1)},
}


def case_of_kind(kind: str) -> Case:
    """A case of that kind, whose lengths are the caller's to choose."""
    return Case(**{"head_dim": 128, "heads": (8, 2), "dtype": torch.bfloat16, **(KINDS | QUANTISED | PACKED)[kind]})
