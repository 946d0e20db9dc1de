"""The rows of a batch as sequences of blocks: shared by any number of rows, and copied before one of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from ... import BlockPool, BlockTable, FullAttentionSpec, LayerCache, MLASpec, PagedKVCache, SlidingWindowSpec, ops

MOST_TOKENS = 1 << 21  # ids cost the host some bytes each, used or not
_GROWTH = 1.5


class BlockStore:
    """Block ids and the memory behind them: a cache per layer, in each of which any id has a place.

    Layers share no memory: torch.compile can trace writes to tensors that overlap only within one layer.

    With `num_blocks` the memory is taken at once and for good. Without, it is taken when ids are handed out, grows with
    the largest of them, and is copied when it grows.

    Formats that encode whole blocks have a second store, `recent`, for the blocks of such layers that are not encoded
    yet. It takes memory as ids are handed out, with `num_blocks` too.

    Attributes:
        recent_blocks: how many blocks before its own a query reads there. first_blocks: and how many of a row's first.
        caches: what each layer gets, in order; others after every `allocate`.
    """

    recent: BlockStore | None

    def __init__(
        self,
        specs: Sequence[FullAttentionSpec | SlidingWindowSpec | MLASpec],
        num_blocks: int | None,
        device: torch.device,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Block 0 is kept back, see `BlockPool`.

        Args:
            specs: one per layer, all with one block size.
            most_tokens: how far memory can grow, where it does.
        """
        self.block_size = specs[0].block_size
        self.device = device
        self.caches: list[LayerCache] = []
        self.pool = BlockPool(num_blocks or 2 + most_tokens // self.block_size, enable_caching=False)
        self._specs = specs
        second = [replace(spec, kv_cache_dtype="auto") for spec in specs if spec.format.whole_blocks]
        self.recent = BlockStore(second, None, device, most_tokens) if second else None
        self.recent_blocks = max(spec.format.recent_blocks(self.block_size) for spec in specs)
        self.first_blocks = max(spec.format.first_blocks(self.block_size) for spec in specs)
        self._memory: list[PagedKVCache] = []
        self._num_blocks = self._wanted = 0
        if num_blocks is not None:
            self._take_memory(num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(cache.nbytes for cache in self._memory) + (0 if self.recent is None else self.recent.nbytes)

    def layer_caches(self) -> list[LayerCache]:
        """`caches`, each with its part of `recent`, where there is one."""
        if self.recent is None:
            return self.caches
        second = iter(self.recent.caches)
        return [
            replace(cache, recent=next(second)) if spec.format.whole_blocks else cache
            for cache, spec in zip(self.caches, self._specs, strict=True)
        ]

    @property
    def num_used(self) -> int:
        """Blocks that are referenced."""
        return self.pool.num_usable - self.pool.num_free

    def expect(self, num_blocks: int) -> None:
        """Take memory for `num_blocks` blocks at once, when the first is allocated."""
        self._wanted = min(num_blocks + 1, self.pool.num_blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each.

        Raises:
            CapacityError: fewer are free, or the device has no memory for them.
        """
        blocks = self.pool.allocate(count)
        needed = max(blocks, default=0) + 1
        if count and needed > self._num_blocks:
            grown = min(int(self._num_blocks * _GROWTH), self.pool.num_blocks)
            try:
                self._take_memory(max(needed, grown, self._wanted))
            except Exception:
                self.pool.free(blocks)
                raise
        return blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers."""
        slabs = [slab for cache in self._memory for slab in cache.slabs]
        ops.copy_blocks(slabs, torch.tensor(pairs, dtype=torch.int64))

    @torch.inference_mode(False)  # else it could not be written outside of it
    def _take_memory(self, num_blocks: int) -> None:
        old, self._memory = self._memory, []
        try:
            for layer, spec in enumerate(self._specs):
                # Of a second cache only that of `recent` is used.
                fewest = 1 if spec.format.whole_blocks else None
                cache = PagedKVCache.from_specs([spec], num_blocks, device=self.device, recent_blocks=fewest)
                if old:
                    cache.slabs[:, : self._num_blocks].copy_(old[layer].slabs)
                self._memory.append(cache)
        except Exception:
            self._memory = old
            raise
        self.caches, self._num_blocks = [cache.layer(0) for cache in self._memory], num_blocks


class Rows:
    """How many tokens each row of a batch has stored, and in which blocks.

    A block that several rows hold is copied when one of them is to write to it, so rows may be repeated, taken and cut
    at the cost of counting.

    Attributes:
        lengths: stored tokens per row. Only this class writes it.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.lengths: list[int] = []
        self._blocks: list[list[int]] = []
        self._table: BlockTable | None = None
        self._changed: set[int] = set()
        self._widest = 1
        self._shared = False  # whether any block may have another holder

    def start(self, count: int) -> None:
        """Become `count` empty rows."""
        self.release()
        self.lengths, self._blocks, self._table = [0] * count, [[] for _ in range(count)], None
        self._changed = set(range(count))

    def __len__(self) -> int:
        return len(self.lengths)

    def __del__(self) -> None:
        self.release()

    def expect(self, lengths: Sequence[int], shared: Sequence[int], copies: int = 0) -> None:
        """Rows will grow to these lengths; `shared[i]` tokens of row i are another's. `copies`: blocks beyond that."""
        size = self.store.block_size
        blocks = [-(-length // size) for length in lengths]
        self._widest = max(blocks, default=1)
        self.store.expect(sum(blocks) - sum(length // size for length in shared) + copies)

    def append(self, counts: Sequence[int]) -> None:
        """Make room for `counts[i]` new tokens in row i.

        Raises:
            CapacityError: too few blocks are free; nothing is changed.
        """
        needs = self._needs(counts)
        fresh = iter(self.store.allocate(sum(new + shared for _, new, shared in needs)) if needs else ())
        copies = []
        for row, new, shared in needs:
            blocks = self._blocks[row]
            if shared:
                copies.append((blocks[-1], next(fresh)))
                blocks[-1] = copies[-1][1]
            blocks.extend(islice(fresh, new))
            self._changed.add(row)
        if copies:
            self.store.copy(copies)
            self.store.pool.free([source for source, _ in copies])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def append_alike(self, counts: Sequence[int], together: int) -> None:
        """As `append`, where every `together` rows in turn have had the same tokens and get the same: they share all.

        Raises:
            CapacityError: too few blocks are free; nothing is changed.
        """
        size, first = self.store.block_size, range(0, len(self), together)
        needs = [-(-(self.lengths[row] + counts[row]) // size) - len(self._blocks[row]) for row in first]
        fresh = iter(self.store.allocate(sum(needs)))
        for row, new in zip(first, needs, strict=True):
            blocks = list(islice(fresh, new))
            for other in range(row, row + together):
                self._blocks[other].extend(blocks)
                if other != row:
                    self.store.pool.touch(blocks)
        self._changed, self._shared = set(range(len(self))), True
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _needs(self, counts: Sequence[int]) -> list[tuple[int, int, bool]]:
        """Row, new blocks, and whether its open block has other holders, for each row that needs a block."""
        size, pool = self.store.block_size, self.store.pool
        holders: dict[int, int] = {}
        needs = []
        for row, (blocks, length, count) in enumerate(zip(self._blocks, self.lengths, counts, strict=True)):
            if not count:
                continue
            shared = False
            if self._shared and length % size:
                last = blocks[-1]
                left = holders[last] if last in holders else pool.ref_count(last)
                shared = left > 1
                holders[last] = left - shared  # the last of several holders may keep it
            new = -(-(length + count) // size) - len(blocks)
            if new or shared:
                needs.append((row, new, shared))
        return needs

    def release_before(self, positions: Sequence[int], kept: int = 0) -> None:
        """Give up each row's blocks before that of a position, but for the first `kept`, for null blocks: they are not
        read any more."""
        size, pool = self.store.block_size, self.store.pool
        firsts = [position // size for position in positions]
        for row, (blocks, first) in enumerate(zip(self._blocks, firsts, strict=True)):
            passed = [block for block in blocks[kept:first] if block != pool.null_block]
            if passed:
                pool.free(passed)
                blocks[kept:first] = [pool.null_block] * (first - kept)
                self._changed.add(row)

    def holds(self, lengths: Sequence[int], before: int = 0) -> bool:
        """Whether each row's open block, and so many before it, would be there, if it were cut to this length."""
        size, null = self.store.block_size, self.store.pool.null_block
        ends = zip(self._blocks, lengths, strict=True)
        return all(null not in blocks[max(n // size - before, 0) : -(-n // size)] for blocks, n in ends)

    def take(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was; rows that are not named are given up."""
        if list(rows) == list(range(len(self))):
            return
        uses = Counter(rows)
        for row, blocks in enumerate(self._blocks):
            for _ in range(uses[row] - 1):
                self.store.pool.touch(blocks)
                self._shared = True
        for row, blocks in enumerate(self._blocks):
            if not uses[row]:
                self.store.pool.free(blocks)
        if len(rows) != len(self):
            self._table = None
        self._blocks = [list(self._blocks[row]) for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._changed = set(range(len(rows)))

    def cut(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` tokens of each row."""
        for row, length in enumerate(lengths):
            keep = -(-length // self.store.block_size)
            blocks = self._blocks[row]
            if keep < len(blocks):
                self.store.pool.free(blocks[keep:])
                del blocks[keep:]
        self.lengths = list(lengths)

    def fork(self) -> Rows:
        """Other rows that hold the same tokens."""
        forked = Rows(self.store)
        forked.start(len(self))
        forked._blocks, forked.lengths = [list(blocks) for blocks in self._blocks], list(self.lengths)
        for blocks in forked._blocks:
            self.store.pool.touch(blocks)
        self._shared = forked._shared = True
        return forked

    def release(self) -> None:
        """Give all blocks up; no rows are left."""
        for blocks in self._blocks:
            self.store.pool.free(blocks)
        self._blocks, self.lengths, self._changed = [], [], set()

    @torch.inference_mode(False)
    def table(self) -> torch.Tensor:
        """[B, max_blocks] int32 on the device, the same memory until rows outgrow it."""
        longest = max(map(len, self._blocks), default=1)
        if self._table is None or longest > self._table.device_table.shape[1]:
            width = max(self._widest, longest if self._table is None else 2 * longest, 1)
            self._table = BlockTable(max(1, len(self)), width, self.store.block_size, self.store.device)
            self._changed = set(range(len(self)))
        if self._changed:
            for row in self._changed:
                self._table.add_row(row, self._blocks[row])
            self._table.commit()
            self._changed = set()
        return self._table.device_table
