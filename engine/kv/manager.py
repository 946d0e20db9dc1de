"""Which KV blocks each request holds: several KV groups (full and sliding window) over one BlockPool.

The one rule of sizes: a group with blocks of S tokens needs ceil(n / S) table entries for n tokens. A table only grows
at its end while the request runs; entries that a sliding window has passed become the null block. A block is keyed
(made findable for other requests) only by `commit`, after the step that filled it succeeded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedattn import BlockPool

from ..kv_group import KVGroup
from ..request import Request
from .offload import PrefixCopies, SwapSpace, contents_of, found_tables
from .prefix_cache import PrefixCache, PrefixHit, first_extra

if TYPE_CHECKING:
    from pagedattn.cache.prefix_tree import PrefixNode


class KVCacheManager:
    """Block tables of all requests. Every method leaves the state as it was where it returns False or None."""

    def __init__(
        self, pool: BlockPool, groups: Sequence[KVGroup], num_swap_blocks: int = 0, keeps_prefixes: bool = False
    ) -> None:
        """Manage `pool`, whose block ids all `groups` share (an id belongs to one group at a time).

        Args:
            num_swap_blocks: blocks of host memory that preempted requests may be swapped to.
            keeps_prefixes: what host memory has room for of evicted content is copied there, and found again.
        """
        self.pool = pool
        self.groups = tuple(groups)
        self.swap = SwapSpace(num_swap_blocks)
        self.block_sizes = tuple(group.block_size for group in groups)
        self.windows = tuple(group.sliding_window for group in groups)
        self.copies = PrefixCopies(pool, self.swap, keeps_prefixes)
        self.prefixes = PrefixCache(pool, self.groups, self.copies)
        self._invalid_nodes: set[int] = set()
        self._fresh: list[int] = []

    def lookup(self, request: Request) -> PrefixHit:
        """The cached beginning of a request that holds no blocks: full blocks only, never its last token."""
        return self.prefixes.lookup(request, self._invalid_nodes)

    def start(self, request: Request, hit: PrefixHit, num_new_tokens: int, headroom: int = 0) -> bool:
        """Give a request that holds no blocks its hit and room for `num_new_tokens` more; all groups or nothing.

        `headroom` blocks must stay free beyond that. Unreferenced blocks of the hit are free blocks themselves, so
        the test is: all blocks - hit blocks <= free blocks - unreferenced hit blocks - headroom.
        """
        end = hit.num_tokens + num_new_tokens
        need = sum(-(-end // size) - len(table) for size, table in zip(self.block_sizes, hit.blocks, strict=True))
        need += sum(table.count(-1) for table in hit.blocks)
        held = [block for table in hit.blocks for block in table if block > 0]
        if need + headroom > self.pool.num_free - self.pool.num_evictable(held):
            return False
        self.pool.touch(held)
        request.block_ids = [list(table) for table in hit.blocks]
        request.num_computed_tokens = request.num_cached_tokens = hit.num_tokens
        self._open(request, list(hit.last_prefix_nodes))
        self._load_copies(request)
        return self.allocate_slots(request, num_new_tokens)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Free a request's blocks for now; returns pairs (block, host block) to copy before they are written again.

        None, and nothing done, where there is no host memory for them.
        """
        pairs = self.swap.store(request, self.pool, self.groups)
        if pairs is not None:
            self.free(request)
        return pairs

    def swap_in(self, request: Request, num_new_tokens: int, headroom: int = 0) -> list[tuple[int, int]] | None:
        """As `start`, for a swapped request: blocks for all that it had, and room for `num_new_tokens` more.

        What is stored of the request stays until `swap.drop`. Where a block was lost it is dropped at once: the request
        must be started anew.

        Returns:
            Pairs (host block, block) to copy before the next step, or None where there are not enough free blocks.
        """
        swapped = request.swapped
        found = found_tables(swapped, self.pool, self.groups, self._invalid_nodes) if swapped is not None else None
        if swapped is None or found is None:
            self.swap.drop(request)
            return None
        end = swapped.num_computed_tokens + num_new_tokens
        held = [block for table in found for block in table if block]
        entries = sum(block is not None for table in found for block in table)
        need = sum(-(-end // size) for size in self.block_sizes) - entries
        if need + headroom > self.pool.num_free - self.pool.num_evictable(held):
            return None
        self.pool.touch(held)
        missing = [[entry for entry, block in enumerate(table) if block is None] for table in found]
        fresh = iter(self.pool.allocate(sum(map(len, missing))))
        request.block_ids = [[next(fresh) if block is None else block for block in table] for table in found]
        request.num_computed_tokens, request.num_cached_tokens = swapped.num_computed_tokens, swapped.num_cached_tokens
        self._open(request, [None] * len(self.groups))
        for group, (contents, entries) in enumerate(zip(swapped.contents, missing, strict=True)):
            # Blocks are keyed again from the first one on that is copied: its content may have been forgotten.
            keyed = min([len(contents), *entries])
            request.num_cached_blocks[group] = keyed
            request.last_prefix_nodes[group] = contents[keyed - 1] if keyed else None
        self._plan_commit(request)
        self.allocate_slots(request, num_new_tokens)
        places = zip(request.block_ids, swapped.places, missing, strict=True)
        return [(place[entry], table[entry]) for table, place, entries in places for entry in entries]

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
        self._fresh += fresh
        taken = 0
        for table, need in zip(request.block_ids, needs, strict=True):
            table.extend(fresh[taken : taken + need])
            taken += need
        self._count_slots(request)
        return True

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call to be written token by token, with whatever others left in them."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def commit(self, request: Request) -> None:
        """Key the blocks that `num_computed_tokens` has filled, then release what the windows have passed."""
        if request.num_computed_tokens < request.commit_at:
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
        """Free a request whose values are not to be trusted: the blocks that it computed itself are never hit."""
        for group, size in enumerate(self.block_sizes):
            contents = contents_of(request, group) if request.swapped is None else request.swapped.contents[group]
            for first_own in contents[request.num_cached_tokens // size :][:1]:
                self._invalid_nodes.add(first_own.uid)
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
        firsts = [group.first_needed_block(shared) for group in self.groups]
        if any(released > first for released, first in zip(parent.num_released, firsts, strict=True)):
            return None
        child.block_ids, copies, last_prefix_nodes = [], [], []
        for group, size in enumerate(self.block_sizes):
            table = parent.block_ids[group][: -(-shared // size)]
            table[: firsts[group]] = [self.pool.null_block] * firsts[group]
            forked, pairs = self.pool.fork(table, has_open_block=shared % size > 0)
            child.block_ids.append(forked)
            copies += pairs
            last_prefix_nodes.append(
                _ancestor(parent.last_prefix_nodes[group], parent.num_cached_blocks[group] - shared // size)
            )
        child.num_computed_tokens = child.num_cached_tokens = shared
        self._open(child, last_prefix_nodes)
        self.allocate_slots(child, 1)
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while a request holds blocks, of the host's memory too."""
        if self.swap.num_free + len(self.copies) < self.swap.num_blocks or not self.pool.reset():
            return False
        self.copies.clear()
        self._invalid_nodes.clear()
        return True

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a request of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a time."""
        return sum(group.blocks_for(num_tokens, chunk) for group in self.groups)

    def _open(self, request: Request, last_prefix_nodes: list[PrefixNode | None]) -> None:
        """Set up the bookkeeping of new tables, whose full blocks all carry keys already."""
        computed = request.num_computed_tokens
        request.last_prefix_nodes = last_prefix_nodes
        request.num_cached_blocks = [computed // size for size in self.block_sizes]
        request.num_released = [group.first_needed_block(computed) for group in self.groups]
        self._count_slots(request)
        self._plan_commit(request)

    def _load_copies(self, request: Request) -> None:
        """Take blocks for what of a hit only host memory holds; they are keyed when the next step has succeeded."""
        loads: list[tuple[PrefixNode, int, int]] = []  # content, group, table entry
        for group, table in enumerate(request.block_ids):
            if -1 in table:
                first, entry, node = table.index(-1), len(table), request.last_prefix_nodes[group]
                while entry > first and node is not None:
                    entry -= 1
                    if table[entry] < 0:
                        self.copies.hold(node, group)
                        loads.append((node, group, entry))
                    node = node.parent
                request.num_cached_blocks[group], request.last_prefix_nodes[group] = first, node
        if loads:
            for (node, group, entry), block in zip(loads, self.pool.allocate(len(loads)), strict=True):
                request.block_ids[group][entry] = block
                self.copies.load(node, group, block)
            self._plan_commit(request)

    def _key(self, request: Request, group: int) -> None:
        size, table, node = self.block_sizes[group], request.block_ids[group], request.last_prefix_nodes[group]
        full = request.num_computed_tokens // size
        for index in range(request.num_cached_blocks[group], full):
            tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
            node = self.pool.commit(table[index], node, tokens, first_extra(request) if index == 0 else (), group)
        request.last_prefix_nodes[group], request.num_cached_blocks[group] = node, full

    def _release(self, request: Request, group: int) -> None:
        released = request.num_released[group]
        first = self.groups[group].first_needed_block(request.num_computed_tokens)
        if first > released:
            table = request.block_ids[group]
            passed = table[released:first]
            table[released:first] = [self.pool.null_block] * len(passed)
            request.num_released[group] = first
            self.pool.free(passed)

    def _count_slots(self, request: Request) -> None:
        sizes = zip(self.block_sizes, request.block_ids, strict=False)
        request.num_slots = min((size * len(table) for size, table in sizes), default=0)

    def _plan_commit(self, request: Request) -> None:
        """Note from how many computed tokens on `commit` has something to key or to release."""
        due = sys.maxsize
        for group, (size, window) in enumerate(zip(self.block_sizes, self.windows, strict=True)):
            if self.pool.enable_caching:
                due = min(due, (request.num_cached_blocks[group] + 1) * size)
            if window is not None:
                due = min(due, (request.num_released[group] + 1) * size + window - 1)
        request.commit_at = due


def _ancestor(node: PrefixNode | None, steps: int) -> PrefixNode | None:
    for _ in range(steps):
        node = node.parent if node is not None else None
    return node
