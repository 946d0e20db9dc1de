"""Sequences in a layer's two caches, and what attention over them is by definition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from pagedattn import Attention, BlockPool, CommonAttentionMetadata, Mask, PagedKVCache
from pagedattn.formats.registry import format_of
from pagedattn.testing.oracle import attention_oracle

SIZE, HEADS, KV_HEADS, DIM, LENGTH = 32, 4, 2, 64, 150
BACKENDS = ("TORCH", "TRITON")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY, VALUE = normal(LENGTH, HEADS, DIM), normal(LENGTH, KV_HEADS, DIM, seed=1)
KEY = normal(LENGTH, KV_HEADS, DIM, seed=2) + 2 * normal(KV_HEADS, DIM, seed=3)


class Sequences:
    """A layer, both caches with pools of their own, and sequences in them by their block ids."""

    def __init__(
        self,
        backend: str,
        stored: str = "int4",
        num_blocks: int = 40,
        recent_blocks: int = 20,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        kind: dict[str, Any] = {"kv_cache_dtype": stored, "dtype": dtype}
        self.layer = Attention(HEADS, DIM, KV_HEADS, backend=backend, block_size=SIZE, **kind, **options)
        self.before, self.kept = format_of(stored).recent_blocks(SIZE), format_of(stored).first_blocks(SIZE)
        shape = (1, num_blocks, SIZE, KV_HEADS, DIM)
        self.cache = PagedKVCache(*shape, recent_blocks=recent_blocks, **kind)
        self.cache.slabs.fill_(0x7F)  # scales that are NaN, and rows too
        self.recent.slabs.fill_(0xFF)
        self.pool, self.recent_pool = BlockPool(num_blocks), BlockPool(recent_blocks)

    @property
    def recent(self) -> PagedKVCache:
        assert self.cache.recent is not None
        return self.cache.recent

    def new(self) -> Sequence1:
        return Sequence1(self)


class Sequence1:
    """One sequence: its length, and its blocks in either cache, -7 where one was released."""

    def __init__(self, owner: Sequences) -> None:
        self.owner, self.length = owner, 0
        self.blocks: list[int] = []
        self.recent: list[int] = []

    def append(
        self, count: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (QUERY, KEY, VALUE)
    ) -> torch.Tensor:
        """The output of `count` more tokens, in a step of its own; recent blocks that they do not read are released."""
        start, self.length = self.length, self.length + count
        self._release(max(start // SIZE - self.owner.before, 0))
        for blocks, pool in ((self.blocks, self.owner.pool), (self.recent, self.owner.recent_pool)):
            blocks += pool.allocate(max(-(-self.length // SIZE) - len(blocks), 0))
        tables = (torch.tensor([[*ids, 2**31 - 1]]).int() for ids in (self.blocks, self.recent))
        table, recent_table = tables
        common = CommonAttentionMetadata.from_lengths(
            [count], [self.length], table, block_size=SIZE, recent_table=recent_table
        )
        query, key, value = (x[start : self.length] for x in rows)
        return self.owner.layer(query, key, value, self.owner.cache.layer(0), common)

    def _release(self, first: int) -> None:
        kept = self.owner.kept
        passed = [block for block in self.recent[kept:first] if block >= 0]
        self.owner.recent_pool.free(passed)
        unheld = [block for block in passed if not self.owner.recent_pool.ref_count(block)]
        self.owner.recent.slabs[:, unheld] = 0xFF
        self.recent[kept:first] = [-7] * (first - kept)

    def take_back(self, count: int) -> None:
        """The last tokens are rejected; their blocks stay."""
        self.length -= count

    def fork(self) -> Sequence1:
        """Another one: it shares the full blocks that it will read of both caches, and has a copy of an open one."""
        other, is_open = Sequence1(self.owner), self.length % SIZE > 0
        full, first = -(-self.length // SIZE), self.first_read()
        other.length = self.length
        other.blocks, pairs = self.owner.pool.fork(self.blocks[:full], has_open_block=is_open)
        self.owner.cache.copy_blocks(pairs)
        recent, pairs = self.owner.recent_pool.fork(self.recent[first:full], has_open_block=is_open)
        self.owner.recent.copy_blocks(pairs)
        other.recent = [-7] * first + recent
        return other

    def first_read(self) -> int:
        """The first block that the next token reads in the second cache."""
        return max(self.length // SIZE - self.owner.before, 0)


@lru_cache
def by_definition(stored: str = "int4", length: int = LENGTH, window: int | None = None) -> torch.Tensor:
    """Each position alone: its own block, those of the format's window and first ones as they came, others encoded."""
    out, form = [], format_of(stored)
    full = length // SIZE * SIZE
    before, kept = (
        -(-int(stored.partition(f"{name}=")[2].partition(":")[0] or 0) // SIZE) for name in ("window", "first")
    )
    encoded = [
        side.decode(side.encode(x[:full].unflatten(0, (-1, SIZE))), DIM, torch.float64).flatten(0, 1)
        for side, x in ((form.key, KEY), (form.value, VALUE))
    ]
    for at in range(length):
        first = max(at // SIZE - before, 0) * SIZE
        low = min(kept * SIZE, first)
        key, value = (
            torch.cat((b[:low].double(), a[low:first], b[first : at + 1].double()))
            for a, b in zip(encoded, (KEY, VALUE), strict=True)
        )
        mask = Mask(True, window)
        out.append(attention_oracle(QUERY[at : at + 1], key, value, scale=DIM**-0.5, mask=mask)[0])
    return torch.cat(out)


def mixed(query_lens: Sequence[int], seq_lens: Sequence[int]) -> CommonAttentionMetadata:
    tables = (torch.arange(1, 1 + 5 * len(seq_lens)).view(-1, 5).int() for _ in range(2))
    table, recent_table = tables
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size=SIZE, recent_table=recent_table)
