"""Benchmark inputs: layers with a cache each, shuffled tables, random data; and the check before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from contenders import Contender
from workload import Workload

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, StepMetadata, plan_step
from pagedattn.testing import attention_oracle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS = {
    "llama8b": (32, 8, 128),
    "llama70b": (64, 8, 128),
    "llama70b-tp8": (8, 1, 128),
    "qwen3-0.6b": (16, 8, 128),
}
_TOTAL_BYTES = 2 << 30 if DEVICE.type == "cuda" else 1 << 26  # all layers together, far beyond L2


@dataclass(slots=True)
class Layers:
    """Equal layers, each with queries and a cache of its own, and one step's metadata."""

    attention: Attention
    caches: PagedKVCache
    queries: list[torch.Tensor]
    common: CommonAttentionMetadata
    metadata: StepMetadata

    def attend(self, layer: int) -> torch.Tensor:
        """Attention without the cache write, as the kernels are compared."""
        return self.attention(self.queries[layer], None, None, self.caches.layer(layer), self.metadata)


def make_layers(work: Workload, model: str, contender: Contender, dtype: torch.dtype) -> Layers:
    """As many layers as make `_TOTAL_BYTES` of keys and values, between 2 and 32."""
    heads, kv_heads, dim = MODELS[model]
    size = contender.block_size
    blocks = [-(-n // size) for n in work.seq_lens]
    layers = max(2, min(32, -(-_TOTAL_BYTES // work.bytes_read(kv_heads, dim, dtype.itemsize))))
    torch.manual_seed(0)
    cache = PagedKVCache(layers, sum(blocks) + 1, size, kv_heads, dim, dtype=dtype, device=DEVICE)
    cache.slabs.view(dtype).normal_()
    ids = torch.randperm(sum(blocks)).to(torch.int32) + 1
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    start = 0
    for row, count in enumerate(blocks):
        table[row, :count] = ids[start : start + count]
        start += count
    common = CommonAttentionMetadata.from_lengths(work.query_lens, work.seq_lens, table.to(DEVICE), block_size=size)
    options = {"block_size": size, "backend": contender.backend, "clean_cache": True, "dtype": dtype, "device": DEVICE}
    attention = Attention(heads, dim, kv_heads, **options)
    queries = [torch.randn(common.num_tokens, heads, dim, dtype=dtype, device=DEVICE) for _ in range(layers)]
    return Layers(attention, cache, queries, common, plan_step([attention], common))


def check(layers: Layers, work: Workload, heads_checked: int = 1) -> float:
    """Relative error of layer 0 against float64 on a few sequences and rows; raises where it is more than twice that
    of a naive implementation in the same dtype."""
    out = layers.attend(0).double()
    spec, cache = layers.attention.spec, layers.caches.layer(0)
    starts = [0, *torch.tensor(work.query_lens).cumsum(0).tolist()]
    worst = 0.0
    for seq in {0, len(work.seq_lens) // 2, len(work.seq_lens) - 1}:
        length, rows = work.seq_lens[seq], min(work.query_lens[seq], 64)
        table = layers.common.block_table[seq, : -(-length // cache.block_size)].long()
        k, v = (x[table].flatten(0, 1)[:length, :heads_checked] for x in (cache.key, cache.value))
        last = slice(starts[seq + 1] - rows, starts[seq + 1])
        q = layers.queries[0][last, : heads_checked * spec.gqa_ratio]
        want, _ = attention_oracle(q, k, v, scale=spec.softmax_scale)
        naive, _ = attention_oracle(q, k, v, scale=spec.softmax_scale, dtype=spec.dtype)
        error, allowed = ((x.double() - want).norm() / want.norm() for x in (out[last, : q.shape[1]], naive))
        if not error <= 2 * allowed:
            raise AssertionError(f"{work.text}: error {error:.2e}, a naive implementation has {allowed:.2e}; not timed")
        worst = max(worst, float(error))
    return worst
