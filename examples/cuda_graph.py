"""A CUDA graph of one decode step, captured once and replayed for every token; needs a GPU."""

from __future__ import annotations

import sys

import torch

import pagedattn
from pagedattn.spec import GraphLevel

HEADS, KV_HEADS, DIM, BATCH, LONGEST = 32, 8, 128, 4, 512
KIND = {"dtype": torch.bfloat16, "device": "cuda"}


def main() -> float:
    """The largest difference between replays and the same steps run as they are."""
    level = GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE  # backends that cannot be captured so far are refused
    layer = pagedattn.Attention(HEADS, DIM, KV_HEADS, graph_level=level, **KIND)
    size = layer.selection.block_size
    columns = -(-LONGEST // size)
    cache = pagedattn.PagedKVCache(1, BATCH * columns + 1, size, KV_HEADS, DIM, **KIND)
    table = 1 + torch.randperm(BATCH * columns, device="cuda").int().view(BATCH, columns)
    query = torch.randn(BATCH, HEADS, DIM, **KIND)
    key, value = (torch.randn(BATCH, KV_HEADS, DIM, **KIND) for _ in range(2))

    def step(lens: list[int]) -> pagedattn.CommonAttentionMetadata:
        return pagedattn.CommonAttentionMetadata.from_lengths([1] * BATCH, lens, table, block_size=size)

    # Static buffers, for the largest step that will be replayed; then a run that compiles kernels, before the capture.
    metadata = pagedattn.plan_step([layer], step([LONGEST] * BATCH), capture=True)
    layer(query, key, value, cache.layer(0), metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(query, key, value, cache.layer(0), metadata)

    worst = 0.0
    for length in range(1, LONGEST + 1, 37):
        common = step([length + sequence if length + sequence <= LONGEST else length for sequence in range(BATCH)])
        for static in (query, key, value):
            static.normal_()  # a model copies its inputs here
        pagedattn.plan_step([layer], common, into=metadata)
        graph.replay()
        eager = layer(query, None, None, cache.layer(0), layer.build(common))  # the replay has written the keys
        worst = max(worst, float((out - eager).abs().max()))
    print(f"{layer.selection.served_by}; replays and eager steps differ by at most {worst:.1e}")
    return worst


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("This example records a CUDA graph and needs an NVIDIA GPU; torch finds none here.")
    main()
