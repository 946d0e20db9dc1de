"""A captured step, replayed with other lengths, tables and padding, equals the eager one bit for bit.

Each backend is captured up to the level it states; what it does not state it refuses to capture.
"""

from __future__ import annotations

import pytest
import torch
from backends.peers import FA2, FA3, FA3_FP8, FLASHINFER, TORCH, TRITON, Peer

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.errors import CapacityError, UnsupportedError
from pagedattn.spec import GraphLevel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, KV_HEADS, DIM, KEYS = 8, 2, 128, 512
REPLAYS = 1000
DECODES, UNIFORM, ANY = [(1, 1), (7, 1), (64, 1)], [(5, 4), (3, 33)], [(6, None)]
STATED = {
    TRITON: (GraphLevel.ALWAYS, DECODES + UNIFORM + ANY),
    FA3: (GraphLevel.ALWAYS, DECODES + UNIFORM + ANY),
    FA3_FP8: (GraphLevel.ALWAYS, DECODES + UNIFORM + ANY),
    FA2: (GraphLevel.UNIFORM_BATCH, DECODES + UNIFORM),
    FLASHINFER: (GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE, DECODES),
    TORCH: (GraphLevel.NEVER, []),
}
CASES = [(peer, *shape) for peer, (_, shapes) in STATED.items() for shape in shapes]


class Captured:
    """One layer's step for at most `batch` sequences of `query_len` new tokens (None: any, 16 together at most)."""

    def __init__(self, peer: Peer, batch: int, query_len: int | None) -> None:
        self.batch, self.query_len = batch, query_len
        self.tokens = batch * (query_len or 16)
        self.size = 256 if peer is FA2 else 16
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        level = STATED[peer][0]
        self.form = peer.kv_cache_dtype
        scales = {} if self.form == "auto" else {"k_scale": 0.5, "v_scale": 0.25}
        options = {"block_size": self.size, "backend": peer.backend, "clean_cache": True, "graph_level": level}
        self.layer = Attention(HEADS, DIM, KV_HEADS, kv_cache_dtype=self.form, **scales, **options, **kind)
        self.columns = KEYS // self.size
        blocks = batch * self.columns + 1
        self.cache = PagedKVCache(1, blocks, self.size, KV_HEADS, DIM, kv_cache_dtype=self.form, **kind)
        self.query = torch.randn(self.tokens, HEADS, DIM, **kind)
        self.key, self.value = (torch.randn(self.tokens, KV_HEADS, DIM, **kind) for _ in range(2))
        self.fill()
        self.static = self.make([query_len or 16] * batch, [KEYS] * batch)
        self.metadata = plan_step([self.layer], self.static, capture=True)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def fill(self) -> None:
        for tensor in (self.query, self.key, self.value):
            tensor.normal_()
        stored = self.cache.slabs.view(torch.bfloat16 if self.form == "auto" else torch.float8_e4m3fn)
        stored.copy_(torch.randn(stored.shape, dtype=torch.bfloat16, device="cuda"))

    def make(self, query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        """A step, padded to the captured batch with empty sequences; the integers are the captured bounds."""
        pad = self.batch - len(query_lens)
        ids = torch.randperm(self.cache.num_blocks - 1)[: len(query_lens) * self.columns].view(-1, self.columns) + 1
        table = torch.cat((ids, torch.zeros(pad, self.columns))).int().cuda()
        common = CommonAttentionMetadata.from_lengths(
            query_lens + [0] * pad, seq_lens + [0] * pad, table, block_size=self.size, num_decodes=0
        )
        slots = torch.full((self.tokens,), -1, dtype=torch.int64, device="cuda")
        slots[: len(common.slot_mapping)] = common.slot_mapping
        return common.replace(
            slot_mapping=slots,
            num_tokens=self.tokens,
            max_query_len=self.query_len or self.tokens,
            max_seq_len=KEYS,
            num_decodes=self.batch if self.query_len == 1 else 0,
        )

    def run(self) -> torch.Tensor:
        return self.layer(self.query, self.key, self.value, self.cache.layer(0), self.metadata)


def lengths(generator: torch.Generator, captured: Captured) -> tuple[list[int], list[int]]:
    """Some live sequences: the captured number of new tokens each, or any that fit together."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    live = pick(1, captured.batch)
    if captured.query_len:
        queries = [captured.query_len] * live
    else:
        queries = [pick(1, captured.tokens // live) for _ in range(live)]
    return queries, [pick(n, KEYS) for n in queries]


@pytest.mark.parametrize(("peer", "batch", "query_len"), CASES, ids=[f"{p.name}-{b}x{q}" for p, b, q in CASES])
def test_replays_equal_eager(peer: Peer, batch: int, query_len: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    if not peer.load().availability().ok:
        pytest.skip(f"{peer.name} is not installed")
    torch.manual_seed(0)
    captured = Captured(peer, batch, query_len)
    generator = torch.Generator().manual_seed(1)
    padded, wrong = 0, torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        queries, keys = lengths(generator, captured)
        padded += len(queries) < batch
        plan_step([captured.layer], captured.make(queries, keys), into=captured.metadata)
        captured.fill()
        before = captured.cache.slabs.clone()
        captured.graph.replay()
        rows = sum(queries)
        replayed, after = captured.out[:rows].clone(), captured.cache.slabs.clone()
        captured.cache.slabs.copy_(before)
        eager = captured.run()[:rows]
        wrong += (~torch.isfinite(replayed)).sum() + (replayed != eager).sum() + (after != captured.cache.slabs).sum()
    assert int(wrong) == 0
    assert batch == 1 or padded > 0


@pytest.mark.parametrize("peer", STATED, ids=lambda peer: peer.name)
def test_levels_are_stated(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    if not peer.load().availability().ok:
        pytest.skip(f"{peer.name} is not installed")
    level = peer.load().capabilities().graph_level
    assert level == STATED[peer][0]
    if level < GraphLevel.ALWAYS:
        kind = {"dtype": torch.bfloat16, "device": "cuda", "block_size": 256, "clean_cache": True}
        with pytest.raises(UnsupportedError, match="graph_level"):
            Attention(HEADS, DIM, KV_HEADS, backend=peer.backend, graph_level=GraphLevel.ALWAYS, **kind)


def test_a_step_beyond_the_capture_is_refused() -> None:
    captured = Captured(TRITON, 2, 1)
    with pytest.raises(CapacityError, match="max_seq_len"):
        more = captured.make([1, 1], [9, 9]).replace(max_seq_len=KEYS + 1)
        plan_step([captured.layer], more, into=captured.metadata)
