"""Decode, prefill and mixed batches: checked against float64, then timed as a model runs them."""

from __future__ import annotations

import pytest
import torch
from problem import DEVICE, MODELS, check, make_layers
from timing import host_us, time_us
from workload import parse

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
DECODE = ["1q1s1k", "1q1s8k", "1q1s32k", "16q1s2k", "64q1s4k", "256q1s1k"] if GPU else ["4q1s256"]
PREFILL = ["32q512", "8q2k", "1q16k", "2q2ks16k"] if GPU else ["2q128"]
MIXED = ["1q2ks4k+64q1s2k"] if GPU else ["2q1s100+1q64s128"]
CASES = [
    *(("decode", "llama8b", text) for text in DECODE),
    *(("decode", "qwen3-0.6b", text) for text in DECODE[-1:]),
    *(("decode", "llama70b-tp8", text) for text in (["64q1s8k"] if GPU else [])),
    *(("prefill", "llama8b", text) for text in PREFILL),
    *(("mixed", "llama8b", text) for text in MIXED),
]


@pytest.mark.parametrize(("suite", "model", "text"), CASES)
def test_attention(benchmark, results, suite: str, model: str, text: str, backend: str) -> None:
    work, (heads, kv_heads, dim) = parse(text), MODELS[model]
    if backend == "TORCH" and work.flops(heads, dim) > 5e11:
        pytest.skip("TORCH materialises logits; a prompt this long says nothing more")
    layers = make_layers(work, model, backend, 16, DTYPE)
    error = check(layers, work)
    calls = [lambda i=i: layers.attend(i) for i in range(layers.caches.num_layers)]
    repeats = 20 if backend != "TORCH" else 4
    us = time_us(calls, repeats)
    benchmark.pedantic(_synced(calls[0]), rounds=3, iterations=1)
    moved = work.bytes_read(kv_heads, dim, DTYPE.itemsize)
    row = {
        "suite": suite,
        "workload": text,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "block_size": 16,
        "dtype": str(DTYPE).removeprefix("torch."),
        "backend": backend,
        "us": round(us, 2),
        "gb_s": round(moved / us / 1e3, 1),
        "tflops": round(work.flops(heads, dim) / us / 1e6, 1),
        "tok_s": None,
        "error": error,
        "host_us": round(host_us(calls[0]), 1),
        "plan_us": round(host_us(lambda: layers.attention.build(layers.common)), 1),
    }
    results.append(row)
    benchmark.extra_info.update(row)
    speed = f"{us:.1f} us, {row['gb_s']} GB/s, {row['tflops']} TF, host {row['host_us']} us"
    print(f"\n{suite} {model} {text} {backend}: {speed}")


def _synced(call):
    def run() -> None:
        call()
        if GPU:
            torch.cuda.synchronize()

    return run
