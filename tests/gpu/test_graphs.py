"""A captured step, replayed with other lengths, tables and padding, equals the eager one bit for bit."""

from __future__ import annotations

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, plan_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, KV_HEADS, DIM, SIZE, COLUMNS = 8, 2, 64, 16, 20


class Captured:
    """One layer's decode step for at most `batch` sequences in a CUDA graph."""

    def __init__(self, batch: int, query_len: int) -> None:
        self.batch, self.query_len, tokens = batch, query_len, batch * query_len
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        self.layer = Attention(HEADS, DIM, KV_HEADS, block_size=SIZE, backend="TRITON", **kind)
        self.cache = PagedKVCache(1, batch * COLUMNS + 1, SIZE, KV_HEADS, DIM, **kind)
        self.cache.slabs.view(torch.bfloat16).normal_()
        self.query = torch.randn(tokens, HEADS, DIM, **kind)
        self.key, self.value = (torch.randn(tokens, KV_HEADS, DIM, **kind) for _ in range(2))
        self.static = self.make([query_len] * batch, [SIZE * COLUMNS] * batch)
        self.metadata = plan_step([self.layer], self.static)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def make(self, query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        """A step, padded to the captured batch with empty sequences; the integers are the captured bounds."""
        pad = self.batch - len(query_lens)
        ids = torch.randperm(self.cache.num_blocks - 1)[: len(query_lens) * COLUMNS].view(-1, COLUMNS) + 1
        table = torch.cat((ids, torch.zeros(pad, COLUMNS))).int().cuda()
        common = CommonAttentionMetadata.from_lengths(
            query_lens + [0] * pad, seq_lens + [0] * pad, table, block_size=SIZE, num_decodes=0
        )
        tokens = self.batch * self.query_len
        slots = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        slots[: len(common.slot_mapping)] = common.slot_mapping
        return common.replace(
            slot_mapping=slots,
            num_tokens=tokens,
            max_query_len=self.query_len,
            max_seq_len=SIZE * COLUMNS,
            num_decodes=self.batch if self.query_len == 1 else 0,
            query_start_loc_cpu=None,
            seq_lens_cpu=None,
        )

    def run(self) -> torch.Tensor:
        return self.layer(self.query, self.key, self.value, self.cache.layer(0), self.metadata)


@pytest.mark.parametrize(("batch", "query_len"), [(1, 1), (7, 1), (64, 1), (5, 4), (3, 33)])
def test_replays_equal_eager(batch: int, query_len: int) -> None:
    torch.manual_seed(0)
    captured = Captured(batch, query_len)
    generator = torch.Generator().manual_seed(1)
    padded = 0
    for _ in range(1000 // batch + 20):
        live = int(torch.randint(1, batch + 1, (1,), generator=generator))
        lens = torch.randint(query_len, SIZE * COLUMNS + 1, (live,), generator=generator).tolist()
        padded += live < batch
        plan_step([captured.layer], captured.make([query_len] * live, lens), into=captured.metadata)
        captured.query.normal_()
        captured.key.normal_()
        captured.cache.slabs.view(torch.bfloat16).normal_()
        before = captured.cache.slabs.clone()
        captured.graph.replay()
        replayed, after = captured.out[: live * query_len].clone(), captured.cache.slabs.clone()
        captured.cache.slabs.copy_(before)
        eager = captured.run()[: live * query_len]
        assert bool(torch.isfinite(replayed).all())
        assert torch.equal(replayed, eager) and torch.equal(after, captured.cache.slabs)
    assert batch == 1 or padded > 0
