"""KV groups over one pool: a half-windowed model holds its tokens in less memory, and no group disturbs another."""

from __future__ import annotations

import torch

from pagedattn import BlockPool, PagedKVCache, ops
from pagedattn.cache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, group_layers

TOKENS, CHUNK, WINDOW, SIZE = 256, 16, 32, 4
FULL = FullAttentionSpec(num_kv_heads=1, head_dim=4, block_size=SIZE)
WINDOWED = SlidingWindowSpec(num_kv_heads=1, head_dim=4, block_size=SIZE, sliding_window=WINDOW)
MODELS: dict[str, list[KVCacheSpec]] = {"full": [FULL] * 8, "half": [FULL, WINDOWED] * 4}


class Sequence:
    """One sequence's tables, one per group; blocks that a window has passed go back to the pool."""

    def __init__(self, specs: list[KVCacheSpec], num_blocks: int) -> None:
        self.groups = group_layers(specs)
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = [[] for _ in self.groups]
        self.tokens = self.peak = self.released = 0

    def append(self, tokens: int) -> None:
        self.tokens += tokens
        for group, table in zip(self.groups, self.tables, strict=True):
            table += self.pool.allocate(-(-self.tokens // group.spec.block_size) - len(table))
        self.peak = max(self.peak, self.pool.num_usable - self.pool.num_free)

    def release(self) -> None:
        for group, table in zip(self.groups, self.tables, strict=True):
            window = group.spec.window()
            passed = 0 if window is None else max(0, self.tokens - window + 1) // group.spec.block_size
            live = [block for block in table[:passed] if block != self.pool.null_block]
            self.released += len(live)
            self.pool.free(live)
            table[:passed] = [self.pool.null_block] * passed


def run(specs: list[KVCacheSpec], num_blocks: int) -> Sequence:
    sequence = Sequence(specs, num_blocks)
    for _ in range(0, TOKENS, CHUNK):
        sequence.append(CHUNK)
        sequence.release()
    return sequence


def test_half_windowed_needs_less_memory_than_full() -> None:
    caches = {}
    for name, specs in MODELS.items():
        peak = run(specs, 10_000).peak
        assert run(specs, peak + 1).tokens == TOKENS  # the pool that the cache below can back is enough
        caches[name] = PagedKVCache.from_specs(specs, num_blocks=peak + 1)
    full, half = caches["full"], caches["half"]
    assert (len(full.groups), full.slabs.shape[0]) == (1, 8)
    assert (len(half.groups), half.slabs.shape[0]) == (2, 4)
    assert full.bytes_per_block == half.bytes_per_block
    exact = TOKENS // SIZE + (WINDOW + CHUNK) // SIZE  # every token in full layers, window and chunk in the others
    assert full.num_blocks == TOKENS // SIZE + 1
    assert exact - 1 <= half.num_blocks <= exact + 1
    assert half.nbytes < 0.62 * full.nbytes


def test_each_group_reads_back_what_it_wrote() -> None:
    specs = MODELS["half"]
    sequence = Sequence(specs, run(specs, 10_000).peak + 1)
    cache = PagedKVCache.from_specs(specs, num_blocks=sequence.pool.num_blocks)
    truth = torch.randn(8, TOKENS, 1, 4)
    for start in range(0, TOKENS, CHUNK):
        sequence.append(CHUNK)
        lens = torch.tensor([start + CHUNK], dtype=torch.int32)
        slots = torch.empty(2, CHUNK, dtype=torch.int64)
        tables = torch.tensor(sequence.tables, dtype=torch.int32)[:, None]
        ops.compute_slot_mapping(tables, [SIZE, SIZE], torch.tensor([0, CHUNK], dtype=torch.int32), lens, slots)
        for layer in range(8):
            rows, view = truth[layer, start : start + CHUNK], cache.layer(layer)
            ops.reshape_and_cache(rows, -rows, view.key, view.value, slots[cache.group_of(layer)])
        sequence.release()
    assert sequence.released == (TOKENS - WINDOW + 1) // SIZE
    for layer in range(8):
        first = 0 if layer % 2 == 0 else (TOKENS - WINDOW + 1) // SIZE * SIZE
        table = torch.tensor([sequence.tables[cache.group_of(layer)]], dtype=torch.int32)
        count = torch.tensor([0, TOKENS - first], dtype=torch.int32)
        view, start = cache.layer(layer), torch.tensor([first], dtype=torch.int32)
        key, value = ops.gather_kv(view.key, view.value, table, count, TOKENS - first, starts=start)
        assert torch.equal(key, truth[layer, first:])
        assert value is not None and torch.equal(value, -truth[layer, first:])
