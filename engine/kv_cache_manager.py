"""Which KV blocks each request holds: several KV groups (full and sliding window) over one BlockPool.

The one rule of sizes: a group with blocks of S tokens needs ceil(n / S) table entries for n tokens. A table only grows
at its end while the request runs; entries that a sliding window has passed become the null block. A block is keyed
(made findable for other requests) only by `commit`, after the step that filled it succeeded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from pagedattn import BlockPool

from .request import Request
from .step import KVGroup

if TYPE_CHECKING:
    from pagedattn.block_pool import ContentNode


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest computed beginning of a request that every group still holds.

    `blocks[g]` is the table of group g over `num_tokens` tokens (null blocks before its window), `tails[g]` the content
    of the last of them.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    tails: tuple[ContentNode | None, ...]


class KVCacheManager:
    """Block tables of all requests. Every method leaves the state as it was where it returns False or None."""

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup]) -> None:
        """Manage `pool`, whose block ids all `groups` share (an id belongs to one group at a time)."""
        self.pool = pool
        self.block_sizes = tuple(group.block_size for group in groups)
        self.windows = tuple(group.sliding_window for group in groups)
        self._alignment = lcm(*self.block_sizes)
        self._poisoned: set[int] = set()

    def lookup(self, request: Request) -> PrefixHit:
        """The cached beginning of a request that holds no blocks: full blocks only, never its last token."""
        limit = (len(request.token_ids) - 1) // self._alignment * self._alignment
        if limit and self.pool.enable_caching and not request.skip_prefix_cache_reads:
            chains = {size: self._chain(request, size, limit // size) for size in set(self.block_sizes)}
            length = min(len(chain) * size for size, chain in chains.items()) // self._alignment * self._alignment
            tables = [
                [self.pool.block_of(node, group) for node in chains[size][: length // size]]
                for group, size in enumerate(self.block_sizes)
            ]
            length = self._common_length(tables, length)
            if length:
                return self._hit(chains, tables, length)
        empty = len(self.block_sizes)
        return PrefixHit(0, tuple([] for _ in range(empty)), (None,) * empty)

    def start(self, request: Request, hit: PrefixHit, num_new_tokens: int, headroom: int = 0) -> bool:
        """Give a request that holds no blocks its hit and room for `num_new_tokens` more; all groups or nothing.

        `headroom` blocks must stay free beyond that. Blocks of the hit that nobody holds are free blocks themselves,
        so the test is: all blocks - hit blocks <= free blocks - hit blocks that nobody holds - headroom.
        """
        end = hit.num_tokens + num_new_tokens
        need = sum(-(-end // size) - len(table) for size, table in zip(self.block_sizes, hit.blocks, strict=True))
        held = [block for table in hit.blocks for block in table if block]
        unheld = sum(not self.pool.ref_count(block) for block in held)
        if need + headroom > self.pool.num_free - unheld:
            return False
        self.pool.touch(held)
        request.block_ids = [list(table) for table in hit.blocks]
        request.num_computed_tokens = request.num_cached_tokens = hit.num_tokens
        self._open(request, list(hit.tails))
        return self.allocate_slots(request, num_new_tokens)

    def allocate_slots(self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Extend the tables to `num_new_tokens` after the computed ones, and a lookahead beyond; or change nothing.

        Lookahead slots are room like any other, but they are never keyed: only computed tokens are.
        """
        end = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        if end <= request.num_slots:
            return True
        if not request.block_ids:
            request.block_ids = [[] for _ in self.block_sizes]
            self._open(request, [None] * len(self.block_sizes))
        needs = [
            max(0, -(-end // size) - len(table))
            for size, table in zip(self.block_sizes, request.block_ids, strict=True)
        ]
        total = sum(needs)
        if total > self.pool.num_free:
            return False
        fresh = self.pool.allocate(total)
        taken = 0
        for table, need in zip(request.block_ids, needs, strict=True):
            table.extend(fresh[taken : taken + need])
            taken += need
        self._count_slots(request)
        return True

    def commit(self, request: Request) -> None:
        """Key the blocks that `num_computed_tokens` has filled, then release what the windows have passed."""
        if request.num_computed_tokens < request.next_commit:
            return
        for group in range(len(self.block_sizes)):
            if self.pool.enable_caching:
                self._key(request, group)
            self._release(request, group)
        self._plan_commit(request)

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the computed tokens: those of a failed step, or of rejected lookahead."""
        for size, table in zip(self.block_sizes, request.block_ids, strict=False):
            keep = -(-request.num_computed_tokens // size)
            if len(table) > keep:
                self.pool.free(table[keep:])
                del table[keep:]
        self._count_slots(request)

    def free(self, request: Request) -> None:
        """Give back every block; keyed ones stay findable until they are handed out again."""
        tables = request.block_ids
        request.clear_cache_state()
        for table in tables:
            self.pool.free(table)

    def discard(self, request: Request) -> None:
        """Free a request whose values are not to be trusted: nobody hits what it computed itself."""
        for size, tail, keyed in zip(self.block_sizes, request.tails, request.num_keyed, strict=True):
            own = keyed - request.num_cached_tokens // size
            if own > 0:
                first = _ancestor(tail, own - 1)
                if first is not None:
                    self._poisoned.add(first.uid)
        self.free(request)

    def fork(self, parent: Request, child: Request, headroom: int = 0) -> list[tuple[int, int]] | None:
        """Let a child that holds no blocks share all but its last token with its parent, and give it room for that one.

        The child's tokens but the last must be the beginning of the parent's computed ones. Full blocks are shared,
        an open block is copied on write.

        Returns:
            Pairs (source, target) to copy before the next step, or None where the parent's window has moved past
            what the child needs or there are not enough free blocks.
        """
        shared = len(child.token_ids) - 1
        if not 0 < shared <= parent.num_computed_tokens or len(self.block_sizes) + headroom > self.pool.num_free:
            return None
        firsts = [self._first_live(group, shared) for group in range(len(self.block_sizes))]
        if any(released > first for released, first in zip(parent.num_released, firsts, strict=True)):
            return None
        child.block_ids, copies, tails = [], [], []
        for group, size in enumerate(self.block_sizes):
            table = parent.block_ids[group][: -(-shared // size)]
            table[: firsts[group]] = [self.pool.null_block] * firsts[group]
            forked, pairs = self.pool.fork(table, has_open_block=shared % size > 0)
            child.block_ids.append(forked)
            copies += pairs
            tails.append(_ancestor(parent.tails[group], parent.num_keyed[group] - shared // size))
        child.num_computed_tokens = child.num_cached_tokens = shared
        self._open(child, tails)
        self.allocate_slots(child, 1)
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while a request holds blocks."""
        if not self.pool.reset():
            return False
        self._poisoned.clear()
        return True

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a request of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a time."""
        total = 0
        for size, window in zip(self.block_sizes, self.windows, strict=True):
            need = -(-num_tokens // size)
            total += need if window is None else min(need, -(-(window - 1 + chunk) // size) + 1)
        return total

    def _chain(self, request: Request, size: int, limit: int) -> list[ContentNode]:
        """The known contents of the request's first blocks of `size` tokens, at most `limit`."""
        chain: list[ContentNode] = []
        find, tokens, node, extra = self.pool.find, request.token_ids, None, _extra(request)
        for start in range(0, limit * size, size):
            node = find(node, tokens[start : start + size].tobytes(), extra)
            if node is None or node.uid in self._poisoned:
                break
            chain.append(node)
            extra = ()
        return chain

    def _common_length(self, tables: list[list[int | None]], length: int) -> int:
        """The longest length, in tokens, up to `length` that every group can serve."""
        while True:
            before = length
            for group, table in enumerate(tables):
                length = self._servable(group, table, length)
            if length == before:
                return length

    def _servable(self, group: int, table: list[int | None], length: int) -> int:
        """The longest aligned length up to `length` for which the group holds every block that a next token reads."""
        size, index = self.block_sizes[group], 0
        if self.windows[group] is None:
            missing = next((index for index, block in enumerate(table) if block is None), len(table))
            return min(length, missing * size // self._alignment * self._alignment)
        index = length // size - 1
        while length:
            first = self._first_live(group, length)
            while index >= first and table[index] is not None:
                index -= 1
            if index < first:
                return length
            length = index * size // self._alignment * self._alignment
            index = length // size - 1
        return 0

    def _hit(self, chains: dict[int, list[ContentNode]], tables: list[list[int | None]], length: int) -> PrefixHit:
        blocks, tails = [], []
        for group, (size, table) in enumerate(zip(self.block_sizes, tables, strict=True)):
            first = self._first_live(group, length)
            live = [block for block in table[first : length // size] if block is not None]
            blocks.append([self.pool.null_block] * first + live)
            tails.append(chains[size][length // size - 1])
        return PrefixHit(length, tuple(blocks), tuple(tails))

    def _open(self, request: Request, tails: list[ContentNode | None]) -> None:
        """Set up the bookkeeping of new tables, whose full blocks all carry keys already."""
        computed = request.num_computed_tokens
        request.tails = tails
        request.num_keyed = [computed // size for size in self.block_sizes]
        request.num_released = [self._first_live(group, computed) for group in range(len(self.block_sizes))]
        self._count_slots(request)
        self._plan_commit(request)

    def _key(self, request: Request, group: int) -> None:
        size, table, node = self.block_sizes[group], request.block_ids[group], request.tails[group]
        full = request.num_computed_tokens // size
        for index in range(request.num_keyed[group], full):
            tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
            node = self.pool.commit(table[index], node, tokens, _extra(request) if index == 0 else (), group)
        request.tails[group], request.num_keyed[group] = node, full

    def _release(self, request: Request, group: int) -> None:
        released, first = request.num_released[group], self._first_live(group, request.num_computed_tokens)
        if first > released:
            table = request.block_ids[group]
            passed = table[released:first]
            table[released:first] = [self.pool.null_block] * len(passed)
            request.num_released[group] = first
            self.pool.free(passed)

    def _first_live(self, group: int, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens` reads."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed_tokens - window + 1) // self.block_sizes[group]

    def _count_slots(self, request: Request) -> None:
        sizes = zip(self.block_sizes, request.block_ids, strict=False)
        request.num_slots = min((size * len(table) for size, table in sizes), default=0)

    def _plan_commit(self, request: Request) -> None:
        """Note from how many computed tokens on `commit` has something to key or to release."""
        due = sys.maxsize
        for group, (size, window) in enumerate(zip(self.block_sizes, self.windows, strict=True)):
            if self.pool.enable_caching:
                due = min(due, (request.num_keyed[group] + 1) * size)
            if window is not None:
                due = min(due, (request.num_released[group] + 1) * size + window - 1)
        request.next_commit = due


def _extra(request: Request) -> tuple[tuple[str, str], ...]:
    """What the key of a first block holds beside its tokens; it separates everything below."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)


def _ancestor(node: ContentNode | None, steps: int) -> ContentNode | None:
    for _ in range(steps):
        node = node.parent if node is not None else None
    return node
