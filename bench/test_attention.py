"""Decode, prefill and mixed batches: checked against float64, then timed as a model runs them."""

from __future__ import annotations

import pytest
import torch
from contenders import contenders
from problem import DEVICE, MODELS, Layers, check, make_layers
from timing import host_us, time_together, time_us
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
def test_attention(benchmark, results, request, suite: str, model: str, text: str) -> None:
    work, (heads, kv_heads, dim) = parse(text), MODELS[model]
    everyone = contenders(request.config.getoption("--backends"))
    if work.flops(heads, dim) > 1e11:  # TORCH materialises logits; a prompt this long says nothing more
        everyone = [one for one in everyone if one.backend != "TORCH"] or pytest.skip("too long for TORCH")
    layers: dict[str, Layers] = {}
    errors: dict[str, float] = {}
    for one in everyone:
        with one.chosen():
            layers[one.name] = make_layers(work, model, one, DTYPE)
            errors[one.name] = check(layers[one.name], work)
    calls = {name: [lambda i=i, o=one: o.attend(i) for i in range(len(one.queries))] for name, one in layers.items()}
    benchmark.pedantic(_synced(next(iter(calls.values()))[0]), rounds=3, iterations=1)
    slow = {name: some for name, some in calls.items() if name == "TORCH"}
    times = time_together({name: some for name, some in calls.items() if name not in slow}) if calls != slow else {}
    times |= {name: time_us(some[:2], 4) for name, some in slow.items()}
    moved = work.bytes_read(kv_heads, dim, DTYPE.itemsize)
    for one in everyone:
        mine, us = layers[one.name], times[one.name]
        with one.chosen():
            row = {
                "suite": suite,
                "workload": text,
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": dim,
                "block_size": one.block_size,
                "dtype": str(DTYPE).removeprefix("torch."),
                "backend": one.name,
                "us": round(us, 2),
                "gb_s": round(moved / us / 1e3, 1),
                "tflops": round(work.flops(heads, dim) / us / 1e6, 1),
                "tok_s": None,
                "error": errors[one.name],
                "host_us": round(host_us(calls[one.name][0]), 1),
                "plan_us": round(host_us(lambda mine=mine: mine.attention.build(mine.common)), 1),
            }
        results.append(row)
        speed = f"{us:.1f} us, {row['gb_s']} GB/s, {row['tflops']} TF, host {row['host_us']}, plan {row['plan_us']} us"
        print(f"\n{suite} {model} {text} {one.name}: {speed}", end="")


def _synced(call):
    def run() -> None:
        call()
        if GPU:
            torch.cuda.synchronize()

    return run
