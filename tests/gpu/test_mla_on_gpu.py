"""Latent attention on a GPU: captured steps replayed with other lengths, steps that wait for nothing, 16-bit errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedattn import CommonAttentionMetadata, MLAAttention, MLASpec, PagedKVCache, plan_step
from pagedattn.backends.registry import get_backend
from pagedattn.bench import flash_mla_library
from pagedattn.formats.mla_rows import deepseek
from pagedattn.formats.mla_rows.format import decode
from pagedattn.spec import GraphLevel
from pagedattn.testing import mla_expanded_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

L, R, N, V, S, KEYS = 512, 64, 128, 128, 16, 1024
REPLAYS = 200
KIND = {"dtype": torch.bfloat16, "device": "cuda"}
SCALE = (N + R) ** -0.5


class Latent:
    """A layer of the sizes that models have, and tensors for steps of at most so many sequences and tokens."""

    def __init__(self, heads: int, seqs: int, tokens: int, block_size: int = S, **options: object) -> None:
        size = self.block_size = block_size
        self.layer = MLAAttention(heads, L, R, N, V, SCALE, block_size=size, **KIND, **options)  # type: ignore[arg-type]
        self.columns = KEYS // size
        stored = str(options.get("kv_cache_dtype", "auto"))
        spec = MLASpec(head_dim=L + R, latent_dim=L, block_size=size, dtype=torch.bfloat16, kv_cache_dtype=stored)
        self.cache = PagedKVCache.from_specs([spec], seqs * self.columns + 1, device="cuda")
        self.weight = torch.randn(heads * (N + V), L, **KIND) * L**-0.5
        self.queries = torch.randn(tokens, heads, N, **KIND), torch.randn(tokens, heads, R, **KIND)
        self.new = torch.randn(tokens, L, **KIND), torch.randn(tokens, R, **KIND)
        self.fill()

    def fill(self) -> None:
        rows = self.cache.layer(0).key
        random = torch.randn(*rows.shape[:3], L + R, **KIND)
        rows.copy_(deepseek.encode(random) if rows.dtype == torch.uint8 else random)
        for tensor in (*self.queries, *self.new):
            tensor.normal_()

    def table(self, seqs: int) -> torch.Tensor:
        ids = torch.randperm(self.cache.num_blocks - 1)[: seqs * self.columns].view(-1, self.columns) + 1
        return ids.int().cuda()

    def run(self, metadata: object) -> torch.Tensor:
        weights = self.layer.split_kv_b(self.weight)
        return self.layer(*self.queries, *self.new, *weights, self.cache.layer(0), metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "query_len"), [(1, 1), (7, 1), (64, 1), (5, 4), (2, 40)])
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize(
    ("backend", "stored"),
    [("TRITON", "auto"), ("TRITON", "fp8"), ("TRITON", "fp8_ds_mla"), ("FLASH_MLA", "auto"), ("FLASH_ATTN", "auto")],
)
def test_replays_equal_eager(backend: str, stored: str, heads: int, batch: int, query_len: int) -> None:
    torch.manual_seed(0)
    flash_mla_library.provide()
    if not get_backend(backend).availability().ok:
        pytest.skip(f"{backend} is not installed")
    tokens = batch * query_len
    options: dict[str, Any] = {"block_size": 64 if backend == "FLASH_MLA" else S, "clean_cache": True}
    options |= {"graph_level": GraphLevel.ALWAYS, "backend": f"prefill=TRITON,decode={backend}"}
    options |= {"kv_cache_dtype": stored}
    latent = Latent(heads, batch, tokens, **options)

    def step(seq_lens: list[int]) -> CommonAttentionMetadata:
        live = len(seq_lens)
        table = torch.cat((latent.table(live), torch.zeros(batch - live, latent.columns, dtype=torch.int32).cuda()))
        lens = [query_len] * live + [0] * (batch - live), seq_lens + [0] * (batch - live)
        made = CommonAttentionMetadata.from_lengths(*lens, table, block_size=latent.block_size, num_decodes=0)
        slots = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        slots[: len(made.slot_mapping)] = made.slot_mapping
        bounds = {"num_tokens": tokens, "max_query_len": query_len, "max_seq_len": KEYS}
        return made.replace(slot_mapping=slots, **bounds)

    metadata = plan_step([latent.layer], step([KEYS] * batch), capture=True)
    latent.run(metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = latent.run(metadata)
    generator, wrong = torch.Generator().manual_seed(1), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        live = int(torch.randint(1, batch + 1, (1,), generator=generator))
        keys = torch.randint(query_len, KEYS + 1, (live,), generator=generator).tolist()
        plan_step([latent.layer], step(keys), into=metadata)
        latent.fill()
        graph.replay()
        rows = live * query_len
        replayed = out[:rows].clone()
        wrong += (~torch.isfinite(replayed)).sum() + (replayed != latent.run(metadata)[:rows]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("stored", ["auto", "fp8", "fp8_ds_mla"])
def test_errors_are_those_of_16_bits(stored: str, heads: int, most: int) -> None:
    torch.manual_seed(0)
    query_lens, seq_lens = [1, 40, 200], [1000, 300, 200]
    kind: dict[str, Any] = {"max_absorbed_len": most, "workspace_bytes": 128 << 20, "kv_cache_dtype": stored}
    latent = Latent(heads, 3, sum(query_lens), **kind)
    table = latent.table(3)
    out = latent.run(CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size=S))
    flat = decode(latent.cache.layer(0).key, None, torch.float64).flatten(0, 2)
    weights = latent.layer.split_kv_b(latent.weight)
    parts = [x.split(query_lens) for x in (*latent.queries, out)]
    for seq, (q_nope, q_pe, got) in enumerate(zip(*parts, strict=True)):
        at = torch.arange(seq_lens[seq], device="cuda")
        rows = flat[table[seq, at // S].long() * S + at % S]
        want, _ = mla_expanded_oracle(q_nope, q_pe, rows[:, :L], rows[:, L:], *weights, scale=SCALE)
        assert float((got.double() - want).norm() / want.norm()) < 1e-2


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lens", [([1, 1, 1], [40, 300, 17]), ([1, 30, 300], [40, 300, 900])], ids=["decode", "mixed"])
@pytest.mark.usefixtures("no_waiting")
def test_a_step_waits_for_nothing(lens: tuple[list[int], list[int]]) -> None:
    latent = Latent(16, 3, sum(lens[0]), workspace_bytes=4 << 20)
    common = CommonAttentionMetadata.from_lengths(*lens, latent.table(3), block_size=S)
    latent.run(plan_step([latent.layer], common))  # compiles, loads, allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    latent.run(plan_step([latent.layer], common))
