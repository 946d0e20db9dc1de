"""A captured step over int4 writes, encodes the blocks that it fills and reads both caches, as an eager one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache
from pagedattn.spec import GraphLevel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE, HEADS, KV_HEADS, DIM, COLUMNS = 32, 8, 2, 128, 16


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_replays_across_blocks_that_fill(tokens: int) -> None:
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    options: dict[str, Any] = {"kv_cache_dtype": "int4", "backend": "TRITON", "graph_level": GraphLevel.ALWAYS}
    layer = Attention(HEADS, DIM, KV_HEADS, **options, **kind)
    caches = [
        PagedKVCache(1, 40, SIZE, KV_HEADS, DIM, kv_cache_dtype="int4", recent_blocks=40, **kind) for _ in range(2)
    ]
    table = torch.arange(1, 1 + 2 * COLUMNS, device="cuda").view(2, COLUMNS).int()
    other = table.flip(1).contiguous()
    query = torch.randn(2 * tokens, HEADS, DIM, **kind)
    key, value = (torch.randn(2 * tokens, KV_HEADS, DIM, **kind) for _ in range(2))

    def step(length: int) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_lengths(
            [tokens] * 2, [length] * 2, table, block_size=SIZE, recent_table=other
        )

    captured = layer.build(step(COLUMNS * SIZE), capture=True)
    layer(query, key, value, caches[0].layer(0), captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(query, key, value, caches[0].layer(0), captured)
    for cache in caches:
        assert cache.recent is not None
        cache.slabs.zero_()
        cache.recent.slabs.zero_()
    for length in range(tokens, 5 * SIZE, tokens):
        for tensor in (query, key, value):
            tensor.normal_()
        layer.builder.build(step(length), captured)
        graph.replay()
        wanted = layer(query, key, value, caches[1].layer(0), layer.build(step(length)))
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        assert torch.equal(caches[0].slabs, caches[1].slabs)
    sealed = caches[0].slabs[0].any(1)
    assert sealed[table[:, : (5 * SIZE - 1) // tokens * tokens // SIZE].flatten().long()].all()
    assert int(sealed.sum()) == 2 * ((5 * SIZE - 1) // tokens * tokens // SIZE)
