"""Blocks in host memory: those of preempted requests, and evicted ones of the prefix cache.

A request is swapped out when it is preempted: `SwapSpace.store` says which of its blocks to copy to which host blocks,
in the step that hands those blocks to others. Blocks that others hold too stay where they are and are found again by
content, as are blocks that were not evicted in the meantime; only the rest is copied back. The host blocks are given up
when the step that copied them back has succeeded, so that a failed step can be tried again.

An evicted block of the prefix cache is copied by the step that hands it to another (`PrefixCopies.store`), and copied
back into a new block for a request that begins alike (`load`), which is keyed once that step has succeeded. Copies that
were not asked for the longest make room for others, and all do for preempted requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pagedattn import BlockPool

from ..kv_group import KVGroup
from ..request import Request, SwappedRequest

if TYPE_CHECKING:
    from pagedattn.cache.prefix_tree import PrefixNode

Pairs = list[tuple[int, int]]


class SwapSpace:
    """Host blocks 0 .. num_blocks - 1 and which requests have them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_requests = 0
        self.reclaim: Callable[[int], None] = lambda count: None
        """Called with the number of blocks that are missing, before a request is refused."""
        # Block ids are handed out from the bottom, so that a large space that is hardly used costs nothing.
        self._untouched, self._freed = 0, list[int]()

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return self.num_blocks - self._untouched + len(self._freed)

    def store(self, request: Request, num_tokens: int, pool: BlockPool, groups: Sequence[KVGroup]) -> Pairs | None:
        """Note the state of a request that holds blocks, before these are freed, as of its first `num_tokens` tokens,
        which are computed. Blocks that are not encoded are found again, or lost: they have no place in host memory.

        Returns:
            Pairs (device block, host block) to copy before the device blocks are written again; None, and nothing
            noted, where the host blocks do not suffice.
        """
        contents = [contents_of(request, group) for group in range(len(groups))]
        moves = [
            (index, entry, block)
            for index, group in enumerate(groups)
            if group.recent_blocks is None
            for entry, block in _live(request, index, -(-num_tokens // group.block_size))
            if pool.ref_count(block) == 1 or _found(pool, contents[index], entry, index) is None
        ]
        if len(moves) > self.num_free:
            self.reclaim(len(moves) - self.num_free)
        if len(moves) > self.num_free:
            return None
        places: list[dict[int, int]] = [{} for _ in groups]
        pairs = []
        for index, entry, block in moves:
            places[index][entry] = host = self.take()
            pairs.append((block, host))
        self.num_requests += 1
        cached = min(request.num_cached_tokens, num_tokens)
        request.swapped = SwappedRequest(num_tokens, cached, contents, places)
        return pairs

    def drop(self, request: Request) -> None:
        """Forget what is stored of a request, if anything is."""
        if request.swapped is not None:
            for places in request.swapped.places:
                self.give_back(places.values())
            request.swapped = None
            self.num_requests -= 1

    def take(self) -> int:
        """A free host block; there must be one."""
        if self._freed:
            return self._freed.pop()
        self._untouched += 1
        return self._untouched - 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """These host blocks hold nothing any more."""
        self._freed += blocks


class PrefixCopies:
    """Host blocks with evicted blocks of a pool, by content and group."""

    def __init__(self, pool: BlockPool, space: SwapSpace, enabled: bool) -> None:
        """Keep what `pool` evicts, as long as `space` has room; nothing where it is not enabled."""
        self._pool, self._space = pool, space
        self._copies: OrderedDict[tuple[PrefixNode, int], int] = OrderedDict()  # least recently used first
        # Of the step in the making, where neither makes room for others: blocks that it stores, copies that it loads.
        self._stored: dict[tuple[PrefixNode, int], int] = {}
        self._held: set[tuple[PrefixNode, int]] = set()
        self._loads: Pairs = []
        space.reclaim = self._make_room
        if enabled:
            pool.on_evict = self.store

    def __len__(self) -> int:
        return len(self._copies)

    def lookup(self, node: PrefixNode, group: int) -> int | None:
        """The host block with a content, if there is one."""
        return self._copies.get((node, group))

    def store(self, block: int, node: PrefixNode, group: int) -> None:
        """Have a block copied that is about to be handed to another, unless there is a copy of its content."""
        key = node, group
        if key not in self._copies:
            if not self._space.num_free:
                self._make_room(1)
            if not self._space.num_free:
                return
            self._copies[key] = self._space.take()
            self._pool.retain(node)
            self._stored[key] = block
        self._copies.move_to_end(key)

    def hold(self, node: PrefixNode, group: int) -> None:
        """Keep a copy, which is to be loaded, in this step."""
        self._copies.move_to_end((node, group))
        self._held.add((node, group))

    def load(self, node: PrefixNode, group: int, block: int) -> None:
        """Have a copy that is held copied to a new block, which must not be keyed before the step has succeeded."""
        self._loads.append((self._copies[node, group], block))

    @property
    def moves(self) -> tuple[Pairs, Pairs]:
        """Of the step in the making: pairs (block, host block) to copy first, then pairs (host block, block)."""
        return [(block, self._copies[key]) for key, block in self._stored.items()], self._loads

    def settle(self, succeeded: bool) -> None:
        """End the step: what it stored counts, or is dropped."""
        stored, self._stored, self._held, self._loads = self._stored, {}, set(), []
        for key in () if succeeded else stored:
            self._drop(key)

    def clear(self) -> None:
        """Forget all copies."""
        for key in [*self._copies]:
            self._drop(key)

    def _make_room(self, count: int) -> None:
        """Drop `count` copies, the least recently used first, but none that this step reads or writes."""
        old = (key for key in self._copies if key not in self._stored and key not in self._held)
        for key in [*islice(old, count)]:
            self._drop(key)

    def _drop(self, key: tuple[PrefixNode, int]) -> None:
        self._space.give_back((self._copies.pop(key),))
        self._pool.release(key[0])


def found_tables(
    swapped: SwappedRequest, pool: BlockPool, groups: Sequence[KVGroup], invalid_nodes: set[int]
) -> list[list[int | None]] | None:
    """Per group, the blocks of a swapped request that are still on the device, None for those to copy back, as are all
    from the first one on whose content's uid is in `invalid_nodes`: another request's block may have been found, with
    wrong values.

    None altogether where a block was not copied and is gone: the request must be computed again.
    """
    tables: list[list[int | None]] = []
    for index, group in enumerate(groups):
        first = group.first_needed_block(swapped.num_computed_tokens)
        end = -(-swapped.num_computed_tokens // group.block_size)
        table: list[int | None] = []
        contents = swapped.contents[index]
        trusted = contents[: next((at for at, node in enumerate(contents) if node.uid in invalid_nodes), len(contents))]
        for entry in range(end):
            if group.num_kept_blocks(first) <= entry < first:
                table.append(pool.null_block)
                continue
            block = _found(pool, trusted, entry, index)
            if block is None and entry not in swapped.places[index]:
                return None
            table.append(block)
        tables.append(table)
    return tables


def _live(request: Request, index: int, end: int) -> list[tuple[int, int]]:
    """(table entry, block) of what the request's next token reads in the first `end` entries of one group."""
    return list(enumerate(request.block_ids[index]))[request.num_released[index] : end]


def _found(pool: BlockPool, contents: list[PrefixNode], entry: int, group: int) -> int | None:
    """A device block with the content of a table entry, if there is one."""
    return pool.block_of(contents[entry], group) if entry < len(contents) else None


def contents_of(request: Request, group: int) -> list[PrefixNode]:
    """The contents of the blocks of one group that carry a key, in the order of the table."""
    node, contents = request.last_prefix_nodes[group], []
    while node is not None:
        contents.append(node)
        node = node.parent
    return contents[::-1]
