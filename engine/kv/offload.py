"""Where the blocks of preempted requests lie in host memory, so that they need not be computed again.

A request is swapped out when it is preempted: `SwapSpace.store` says which of its blocks to copy to which host blocks,
in the step that hands those blocks to others. Blocks that others hold too stay where they are and are found again by
content, as are blocks that were not evicted in the meantime; only the rest is copied back. The host blocks are given up
when the step that copied them back has succeeded, so that a failed step can be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedattn import BlockPool

from ..kv_group import KVGroup
from ..request import Request, SwappedRequest

if TYPE_CHECKING:
    from pagedattn.cache.prefix_tree import ContentNode

Pairs = list[tuple[int, int]]


class SwapSpace:
    """Host blocks 0 .. num_blocks - 1 and who has them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_requests = 0
        # Block ids are handed out from the bottom, so that a large space that is hardly used costs nothing.
        self._untouched, self._freed = 0, list[int]()

    @property
    def num_free(self) -> int:
        """Host blocks that no request has."""
        return self.num_blocks - self._untouched + len(self._freed)

    def store(self, request: Request, pool: BlockPool, groups: Sequence[KVGroup]) -> Pairs | None:
        """Note the state of a request that holds blocks, before these are freed.

        Returns:
            Pairs (device block, host block) to copy before the device blocks are written again; None, and nothing
            noted, where the host blocks do not suffice.
        """
        contents = [contents_of(request, group) for group in range(len(groups))]
        moves = [
            (index, entry, block)
            for index, group in enumerate(groups)
            for entry, block in _live(request, index, group)
            if pool.ref_count(block) == 1 or _found(pool, contents[index], entry, index) is None
        ]
        if len(moves) > self.num_free:
            return None
        places: list[dict[int, int]] = [{} for _ in groups]
        pairs = []
        for index, entry, block in moves:
            places[index][entry] = host = self._take()
            pairs.append((block, host))
        self.num_requests += 1
        request.swapped = SwappedRequest(request.num_computed_tokens, request.num_cached_tokens, contents, places)
        return pairs

    def drop(self, request: Request) -> None:
        """Forget what is stored of a request, if anything is."""
        if request.swapped is not None:
            for places in request.swapped.places:
                self._freed += places.values()
            request.swapped = None
            self.num_requests -= 1

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        self._untouched += 1
        return self._untouched - 1


def found_tables(
    swapped: SwappedRequest, pool: BlockPool, groups: Sequence[KVGroup], poisoned: set[int]
) -> list[list[int | None]] | None:
    """Per group, the blocks of a swapped request that are still on the device, None for those to copy back, as are all
    from one on whose content is of a `poisoned` uid: another request's block may have been found, with wrong values.

    None altogether where a block was not copied and is gone: the request must be computed again.
    """
    tables: list[list[int | None]] = []
    for index, group in enumerate(groups):
        first = group.first_needed_block(swapped.num_computed_tokens)
        end = -(-swapped.num_computed_tokens // group.block_size)
        table: list[int | None] = [pool.null_block] * first
        contents = swapped.contents[index]
        trusted = contents[: next((at for at, node in enumerate(contents) if node.uid in poisoned), len(contents))]
        for entry in range(first, end):
            block = _found(pool, trusted, entry, index)
            if block is None and entry not in swapped.places[index]:
                return None
            table.append(block)
        tables.append(table)
    return tables


def _live(request: Request, index: int, group: KVGroup) -> list[tuple[int, int]]:
    """(table entry, block) of what the request's next token reads in one group."""
    first, end = request.num_released[index], -(-request.num_computed_tokens // group.block_size)
    return list(enumerate(request.block_ids[index]))[first:end]


def _found(pool: BlockPool, contents: list[ContentNode], entry: int, group: int) -> int | None:
    """A device block with the content of a table entry, if there is one."""
    return pool.block_of(contents[entry], group) if entry < len(contents) else None


def contents_of(request: Request, group: int) -> list[ContentNode]:
    """The contents of the blocks of one group that carry a key, in the order of the table."""
    node, contents = request.last_prefix_nodes[group], []
    while node is not None:
        contents.append(node)
        node = node.parent
    return contents[::-1]
