"""Cache ops: writing new tokens and copying blocks, checked, then timed."""

from __future__ import annotations

import pytest
import torch
from problem import DEVICE, make_layers
from test_attention import DTYPE, _synced
from timing import time_us
from workload import parse

from pagedattn import PagedKVCache, ops

GPU = DEVICE.type == "cuda"


@pytest.mark.parametrize("text", ["256q1", "8q1k"] if GPU else ["16q1"])
def test_write(benchmark, results, text: str) -> None:
    layers = make_layers(parse(text), "llama8b", "TRITON" if GPU else "TORCH", 16, DTYPE)
    count = min(8, layers.caches.num_layers)
    calls = [lambda i=i: layers.write(i) for i in range(count)]
    calls[0]()
    cache, slots = layers.caches.layer(0), layers.common.slot_mapping
    for rows, stored in ((layers.keys[0], cache.key), (layers.values[0], cache.value)):
        assert torch.equal(stored[slots // 16, slots % 16], rows), "the cache does not hold what was written"
    us = time_us(calls)
    benchmark.pedantic(_synced(calls[0]), rounds=3, iterations=1)
    moved = 4 * layers.keys[0].nbytes
    _record(results, f"write {text}", us, moved)


def test_copy_blocks(benchmark, results) -> None:
    layers, blocks = (8, 4096) if GPU else (2, 64)
    cache = PagedKVCache(layers, blocks, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    cache.slabs.random_(0, 256)
    pairs = torch.stack((torch.arange(blocks // 2), torch.randperm(blocks // 2) + blocks // 2), 1)
    cache.copy_blocks(pairs)
    assert torch.equal(cache.slabs[:, pairs[:, 1]], cache.slabs[:, pairs[:, 0]]), "the copies differ from their sources"
    run = _synced(lambda: ops.copy_blocks(list(cache.slabs), pairs))
    benchmark.pedantic(run, rounds=10, iterations=1)
    us = benchmark.stats.stats.median * 1e6
    moved = cache.nbytes  # half is read, half is written
    _record(results, f"copy_blocks of {moved >> 21} MB", us, moved)


def _record(results: list[dict[str, object]], workload: str, us: float, moved: int) -> None:
    results.append({"suite": "cache", "workload": workload, "us": round(us, 2), "gb_s": round(moved / us / 1e3, 1)})
    print(f"\n{workload}: {us:.2f} us, {moved / us / 1e3:.0f} GB/s")
