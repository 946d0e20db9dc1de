"""Which KV blocks each request holds: several KV groups (full and sliding window) over one BlockPool, and the blocks
that are not encoded, of formats that encode whole blocks, in a pool of their own.

The one rule of sizes: a group with blocks of S tokens needs ceil(n / S) table entries for n tokens. A table only grows
at its end while the request runs; entries that a sliding window has passed become the null block. A block is keyed
(made findable for other requests) only by `commit`, after the step that filled or encoded it succeeded. That is also
when its block in the pool of those that are not encoded goes back: the next step may be handed it, since steps run one
after another on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedattn import BlockPool
from pagedattn.errors import InvalidInputError

from ..kv_group import KVGroup, groups_of_layers
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

        A last group with `recent_blocks` has `recent_pool`, which is made here; None without one.

        Args:
            num_swap_blocks: blocks of host memory that preempted requests may be swapped to.
            keeps_prefixes: what host memory has room for of evicted content is copied there, and found again.

        Raises:
            InvalidInputError: a group with `recent_blocks` that is not behind one group with blocks of the same size.
        """
        self.pool, self.recent_pool = pool, _recent_pool(pool, groups)
        self.groups, self.layer_groups = tuple(groups), groups_of_layers(groups)
        self.swap = SwapSpace(num_swap_blocks)
        self.block_sizes = tuple(group.block_size for group in groups)
        self.windows = tuple(group.window for group in groups)
        self.copies = PrefixCopies(pool, self.swap, keeps_prefixes)
        self.prefixes = PrefixCache(pool, groups, self.copies)
        self._pools = tuple(pool if group.recent_blocks is None else self.recent_pool or pool for group in groups)
        self._invalid_nodes: set[int] = set()
        self._fresh: list[int] = []
        self._recent_fresh: list[int] = []
        self._recent_copies: list[tuple[int, int]] = []

    def lookup(self, request: Request) -> PrefixHit:
        """The cached beginning of a request that holds no blocks: full blocks only, never its last token."""
        return self.prefixes.lookup(request, self._invalid_nodes)

    def start(self, request: Request, hit: PrefixHit, num_new_tokens: int, headroom: int = 0) -> bool:
        """Give a request that holds no blocks its hit and room for `num_new_tokens` more; all groups or nothing.

        `headroom` blocks must stay free beyond that. Unreferenced blocks of the hit are free blocks themselves, so
        the test is: all blocks - hit blocks <= free blocks - unreferenced hit blocks - headroom.
        """
        end = hit.num_tokens + num_new_tokens
        sizes = zip(self.layer_groups, hit.blocks, strict=False)
        need = sum(-(-end // group.block_size) - len(table) for group, table in sizes)
        need += sum(table.count(-1) for table in hit.blocks)
        if not self._has_room(hit.blocks, need + headroom, hit.num_tokens, num_new_tokens):
            return False
        self._touch(hit.blocks)
        request.block_ids = [list(table) for table in hit.blocks]
        request.num_computed_tokens = request.num_cached_tokens = hit.num_tokens
        self._open(request, list(hit.last_prefix_nodes), [hit.num_tokens // size for size in self.block_sizes])
        self._load_copies(request)
        return self.allocate_slots(request, num_new_tokens)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Free a request's blocks for now; returns pairs (block, host block) to copy before they are written again.

        None, and nothing done, where there is no host memory for them. Of formats that encode whole blocks full ones
        are stored: the tokens of a block that is not full, fewer than it holds, are computed again, which takes no
        host memory for the second cache, and no more time than a decode. Full blocks there stay findable until they
        are handed to others; without prefix caching they are not, and None is returned.
        """
        computed = request.num_computed_tokens
        if self.recent_pool is not None:
            computed -= computed % self.block_sizes[0]
            if self.groups[-1].full_recent_blocks and not self.recent_pool.enable_caching:
                return None
        pairs = self.swap.store(request, computed, self.pool, self.groups) if computed else None
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
        swapped, layers = request.swapped, len(self.layer_groups)
        found = found_tables(swapped, self.pool, self.groups, self._invalid_nodes) if swapped is not None else None
        if swapped is None or found is None:
            self.swap.drop(request)
            return None
        end = swapped.num_computed_tokens + num_new_tokens
        held = [[block for block in table if block] for table in found]
        entries = sum(block is not None for table in found[:layers] for block in table)
        need = sum(-(-end // group.block_size) for group in self.layer_groups) - entries
        if not self._has_room(held, need + headroom, swapped.num_computed_tokens, num_new_tokens):
            return None
        self._touch(held)
        missing = [[entry for entry, block in enumerate(table) if block is None] for table in found]
        fresh = iter(self.pool.allocate(sum(map(len, missing))))
        request.block_ids = [[next(fresh) if block is None else block for block in table] for table in found]
        request.num_computed_tokens, request.num_cached_tokens = swapped.num_computed_tokens, swapped.num_cached_tokens
        # Blocks are keyed again from the first one on that is copied: its content may have been forgotten.
        keyed = [min([len(nodes), *entries]) for nodes, entries in zip(swapped.contents, missing, strict=True)]
        nodes = [nodes[count - 1] if count else None for nodes, count in zip(swapped.contents, keyed, strict=True)]
        self._open(request, nodes, keyed)
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
            request.block_ids = [[] for _ in self.groups]
            self._open(request, [None] * len(self.groups), [0] * len(self.groups))
        needs = [
            max(0, -(-end // size) - len(table))
            for size, table in zip(self.block_sizes, request.block_ids, strict=True)
        ]
        recent = 0 if self.recent_pool is None else needs.pop()
        total = sum(needs)
        if total > self.pool.num_free or (self.recent_pool is not None and recent > self.recent_pool.num_free):
            return False
        fresh = self.pool.allocate(total)
        self._fresh += fresh
        taken = 0
        for table, need in zip(request.block_ids, needs, strict=False):
            table.extend(fresh[taken : taken + need])
            taken += need
        if self.recent_pool is not None and recent:
            fresh = self.recent_pool.allocate(recent)
            self._recent_fresh += fresh
            request.block_ids[-1].extend(fresh)
        self._count_slots(request)
        return True

    def fit_recent(self, num_computed_tokens: int, num_new_tokens: int, headroom: int = 0) -> int:
        """How many of `num_new_tokens` after the computed ones `recent_pool` has blocks for, beside `headroom` left
        over; all where there is none."""
        if self.recent_pool is None:
            return num_new_tokens
        size = self.block_sizes[-1]
        room = -num_computed_tokens % size + size * max(0, self.recent_pool.num_free - headroom)
        return min(num_new_tokens, room)

    def fit_entering(self, num_computed_tokens: int, num_new_tokens: int) -> int:
        """As `fit_recent`, of a request that holds no blocks, and enters with so many tokens that were found: its full
        blocks may be free ones still."""
        full = min(self.groups[-1].full_recent_blocks, num_computed_tokens // self.block_sizes[-1])
        return self.fit_recent(num_computed_tokens, num_new_tokens, full)

    @property
    def most_requests(self) -> int:
        """How many may hold blocks at a time, so that `recent_pool` always has one for the next token of each.

        No bound where it is as large as `pool`, which is short first.
        """
        if self.recent_pool is None or self.recent_pool.num_usable >= self.pool.num_usable:
            return sys.maxsize
        return self.recent_pool.num_usable // (1 + self.groups[-1].full_recent_blocks)

    def _has_room(self, tables: Sequence[Sequence[int]], need: int, num_computed_tokens: int, num_new: int) -> bool:
        """Whether `need` blocks of `pool` are free beside those of `tables`, which a request is to hold, and in
        `recent_pool` those of its new tokens."""
        held = [block for table in tables[: len(self.layer_groups)] for block in table if block > 0]
        if need > self.pool.num_free - self.pool.num_evictable(held):
            return False
        return self.fit_entering(num_computed_tokens, num_new) >= num_new

    def _touch(self, tables: Sequence[Sequence[int]]) -> None:
        """Reference the blocks of each group's table that the device has."""
        for pool, table in zip(self._pools, tables, strict=True):
            pool.touch([block for block in table if block > 0])

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call to be written token by token, with whatever others left in them."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_recent(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Of `recent_pool`: as `take_fresh`, and the pairs (source, target) to copy since the last call."""
        taken = self._recent_fresh, self._recent_copies
        self._recent_fresh, self._recent_copies = [], []
        return taken

    def commit(self, request: Request) -> None:
        """Key the blocks that `num_computed_tokens` has filled, then release what the windows have passed."""
        if request.num_computed_tokens < request.commit_at:
            return
        for group, pool in enumerate(self._pools):
            if pool.enable_caching:
                self._key(request, group)
            self._release(request, group)
        self._plan_commit(request)

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the computed tokens: those of a failed step, or of rejected lookahead."""
        for size, pool, table in zip(self.block_sizes, self._pools, request.block_ids, strict=False):
            keep = -(-request.num_computed_tokens // size)
            if len(table) > keep:
                pool.free(table[keep:])
                del table[keep:]
        self._count_slots(request)

    def free(self, request: Request) -> None:
        """Give back every block; keyed ones stay findable until they are handed out again."""
        tables = request.block_ids
        request.clear_cache_state()
        for pool, table in zip(self._pools, tables, strict=False):
            pool.free(table)

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
        an open block is copied on write, in `recent_pool` too (`take_recent` has those pairs).

        Returns:
            Pairs (source, target) to copy before the next step, or None where the parent's window has moved past
            what the child needs, or it has filled that block, or there are not enough free blocks.
        """
        shared = len(child.token_ids) - 1
        if not 0 < shared <= parent.num_computed_tokens or len(self.layer_groups) + headroom > self.pool.num_free:
            return None
        if self.recent_pool is not None and not self.recent_pool.num_free:  # for an open block, or the next one
            return None
        firsts = [group.first_needed_block(shared) for group in self.groups]
        if any(released > first for released, first in zip(parent.num_released, firsts, strict=True)):
            return None
        child.block_ids, copies = [], []
        for group, (size, pool) in enumerate(zip(self.block_sizes, self._pools, strict=True)):
            table = parent.block_ids[group][: -(-shared // size)]
            kept = self.groups[group].num_kept_blocks(firsts[group])
            table[kept : firsts[group]] = [pool.null_block] * (firsts[group] - kept)
            forked, pairs = pool.fork(table, has_open_block=shared % size > 0)
            child.block_ids.append(forked)
            (copies if pool is self.pool else self._recent_copies).extend(pairs)
        keyed = [min(n, shared // size) for n, size in zip(parent.num_cached_blocks, self.block_sizes, strict=True)]
        steps = (n - mine for n, mine in zip(parent.num_cached_blocks, keyed, strict=True))
        nodes = [_ancestor(node, count) for node, count in zip(parent.last_prefix_nodes, steps, strict=True)]
        child.num_computed_tokens = child.num_cached_tokens = shared
        self._open(child, nodes, keyed)
        self.allocate_slots(child, 1)
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while a request holds blocks, of the host's memory too."""
        if self.swap.num_free + len(self.copies) < self.swap.num_blocks or not self.pool.reset():
            return False
        if self.recent_pool is not None:
            self.recent_pool.reset()
        self.copies.clear()
        self._invalid_nodes.clear()
        return True

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks of `pool` that a request of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a
        time."""
        return sum(group.blocks_for(num_tokens, chunk) for group in self.layer_groups)

    def _open(self, request: Request, last_prefix_nodes: list[PrefixNode | None], num_cached_blocks: list[int]) -> None:
        """Set up the bookkeeping of new tables, whose first blocks carry keys already."""
        computed = request.num_computed_tokens
        request.last_prefix_nodes, request.num_cached_blocks = last_prefix_nodes, num_cached_blocks
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
        pool, first = self._pools[group], request.num_cached_blocks[group]
        stored = max(first, self.groups[group].num_stored_blocks(request.num_computed_tokens))
        for index in range(first, stored):
            tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
            node = pool.commit(table[index], node, tokens, first_extra(request) if index == 0 else (), group)
        request.last_prefix_nodes[group], request.num_cached_blocks[group] = node, stored

    def _release(self, request: Request, group: int) -> None:
        released = request.num_released[group]
        first = self.groups[group].first_needed_block(request.num_computed_tokens)
        if first > released:
            table, begin = request.block_ids[group], max(released, self.groups[group].num_kept_blocks(first))
            passed = table[begin:first]
            table[begin:first] = [self.pool.null_block] * len(passed)
            request.num_released[group] = first
            # A hit that ends where this request does needs the last ones: they are to be evicted after the others.
            self._pools[group].free(passed if self.groups[group].recent_blocks is None else passed[::-1])

    def _count_slots(self, request: Request) -> None:
        sizes = zip(self.block_sizes, request.block_ids, strict=False)
        request.num_slots = min((size * len(table) for size, table in sizes), default=0)

    def _plan_commit(self, request: Request) -> None:
        """Note from how many computed tokens on `commit` has something to key or to release."""
        due = sys.maxsize
        for group, (size, window, pool) in enumerate(zip(self.block_sizes, self.windows, self._pools, strict=True)):
            if pool.enable_caching:
                late = 0 if group == len(self.layer_groups) else self.groups[group].window_blocks
                due = min(due, (request.num_cached_blocks[group] + 1 + late) * size)
            if window is not None:
                due = min(due, (request.num_released[group] + 1) * size + window - 1)
        request.commit_at = due


def _recent_pool(pool: BlockPool, groups: Sequence[KVGroup]) -> BlockPool | None:
    """The pool of a last group of blocks that are not encoded, where full ones are found."""
    *layers, last = groups
    if any(group.recent_blocks is not None for group in layers):
        raise InvalidInputError("groups", "with recent_blocks in the last one alone", list(groups))
    if last.recent_blocks is None:
        return None
    alike = KVGroup(last.block_size, window_blocks=last.window_blocks, first_blocks=last.first_blocks)
    if [*layers] != [alike]:
        raise InvalidInputError("groups", f"{alike} alone before that with recent_blocks", list(groups))
    least = min(2 + last.full_recent_blocks, pool.num_blocks)
    if last.recent_blocks < least:
        expected = f"at least {least}, the null block and those of one request"
        raise InvalidInputError("recent_blocks", expected, last.recent_blocks)
    caching = pool.enable_caching and last.full_recent_blocks > 0
    return BlockPool(last.recent_blocks, enable_caching=caching, contents_of=pool)


def _ancestor(node: PrefixNode | None, steps: int) -> PrefixNode | None:
    for _ in range(steps):
        node = node.parent if node is not None else None
    return node
