"""torch.compile over a module with the layer: one graph, the same numbers, and no recompilation as lengths change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.kernels import hopper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4


class Block(nn.Module):
    """A projection, the layer, and a projection back."""

    def __init__(self, backend: str, **options: object) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, (HEADS + 2 * KV_HEADS) * DIM)
        self.attention = Attention(HEADS, DIM, KV_HEADS, block_size=SIZE, backend=backend, device=DEVICE, **options)  # type: ignore[arg-type]
        self.out = nn.Linear(HEADS * DIM, 32)

    def forward(self, x, cache, step):  # type: ignore[no-untyped-def]
        q, k, v = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
        return x + self.out(self.attention(q, k, v, cache, step).relu())


def step_of(lens: list[tuple[int, int]]) -> CommonAttentionMetadata:
    table = (torch.randperm(15)[: len(lens) * 5] + 1).int().view(len(lens), 5).to(DEVICE)
    queries, keys = zip(*lens, strict=True)
    return CommonAttentionMetadata.from_lengths(queries, keys, table, block_size=SIZE)


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3, "softcap": 5.0}, {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}]
)
@pytest.mark.parametrize("backend", ["TORCH", "TRITON"] if DEVICE == "cuda" else ["TORCH"])
@torch.no_grad()
def test_one_graph(backend: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Block(backend, **options).to(DEVICE)
    graphs = []

    def counting(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counting)
    for lens in ([(5, 5), (2, 9)], [(1, 6), (1, 10)], [(1, 7), (1, 11)], [(3, 20), (1, 2)]):
        common, tokens = step_of(lens), sum(n for n, _ in lens)
        x = torch.randn(tokens, 32, device=DEVICE)
        caches = [PagedKVCache(1, 16, SIZE, KV_HEADS, DIM, device=DEVICE) for _ in range(2)]
        for cache in caches:
            cache.slabs.view(torch.float32).copy_(torch.linspace(-1, 1, cache.slabs.numel() // 4).view(1, 16, -1))
        step = plan_step([model.attention], common)
        eager, traced = model(x, caches[0].layer(0), step), compiled(x, caches[1].layer(0), step)
        torch.testing.assert_close(traced, eager)
        assert torch.equal(caches[0].slabs, caches[1].slabs) and not bool((eager == x).all())
    assert 1 <= len(graphs) <= 3


@pytest.mark.parametrize("decodes", [0, 1])
@torch.no_grad()
def test_few_graphs_for_steps_planned_inside(decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths decide which kernels run and how large their workspace is; the op does so, not the graph around it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    torch.compiler.reset()
    draw, graphs, kind = random.Random(1), [], {"dtype": torch.float16, "device": DEVICE}
    layer = Attention(8, 64, 2, block_size=16, backend="TRITON", **kind)  # type: ignore[arg-type]
    cache = PagedKVCache(1, 1, 16, 2, 64, **kind).layer(0)  # type: ignore[arg-type]

    def counting(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        (outputs,) = [node for node in graph.graph.nodes if node.op == "output"]
        return lambda *given: [torch.zeros(1)] * len(outputs.args[0])  # nothing is computed

    compiled = torch.compile(
        lambda q, k, step: layer(q, k, k, cache, step), fullgraph=True, dynamic=True, backend=counting
    )
    for _ in range(20):
        queries = [1] * decodes + [draw.randrange(2, 150 if draw.random() < 0.5 else 16) for _ in range(2)]
        keys = [draw.choice((150, 300, 1000, 2100, 3000, 4500))] * len(queries)
        table = torch.zeros(len(keys), 300, dtype=torch.int32, device=DEVICE)
        step = CommonAttentionMetadata.from_lengths(queries, keys, table)
        compiled(torch.zeros(sum(queries), 8, 64, **kind), torch.zeros(sum(queries), 2, 64, **kind), step)  # type: ignore[arg-type]
    assert len(graphs) <= 6
