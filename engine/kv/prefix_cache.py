"""The longest beginning of a request that the cache still holds, for every KV group at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedattn import BlockPool

from ..kv_group import KVGroup
from ..request import Request
from .offload import PrefixCopies

if TYPE_CHECKING:
    from pagedattn.cache.prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest computed beginning of a request that every group still holds.

    `blocks[g]` is the table of group g over `num_tokens` tokens: null blocks before its window, -1 where only the
    host has a block. `last_prefix_nodes[g]` is the content of the last of them.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    last_prefix_nodes: tuple[PrefixNode | None, ...]


class _LastChain(NamedTuple):
    """What the last request that was looked up begins with, and the contents of its blocks."""

    salt: str | None
    tokens: np.ndarray  # int32
    nodes: list[PrefixNode]


class PrefixCache:
    """Finds cached beginnings. A hit ends where every group has a whole block, at a multiple of `alignment` tokens.

    A group with a window need not hold what the next token does not read: its hit is its last blocks only, as is that
    of blocks that are not encoded, which lie in a pool of their own.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], copies: PrefixCopies) -> None:
        """Look in `pool`, whose blocks `groups` share but for those with `recent_blocks`, then among the copies of what
        it has evicted."""
        self.alignment = lcm(*(group.block_size for group in groups))
        self._pool, self._groups, self._copies = pool, groups, copies
        self._last: dict[int, _LastChain] = {}  # by block size
        # The first group, and that of blocks that are not encoded, if a hit needs some.
        self._keyed = (0, len(groups) - 1) if groups[-1].full_recent_blocks else (0,)

    def lookup(self, request: Request, invalid_nodes: set[int]) -> PrefixHit:
        """The cached beginning of a request: full blocks only, never its last token, no uid of `invalid_nodes`."""
        limit = self.longest_hit(request)
        if limit:
            sizes = {group.block_size for group in self._groups}
            chains = {size: self._chain(request, size, limit // size, invalid_nodes) for size in sizes}
            length = self.aligned(min(len(chain) * size for size, chain in chains.items()))
            block_of = self._held if len(self._copies) else self._pool.block_of
            tables = [
                [block_of(node, index) for node in chains[group.block_size][: length // group.block_size]]
                for index, group in enumerate(self._groups)
            ]
            length = self._common_length(tables, length)
            if length:
                return self._hit(chains, tables, length)
        empty = len(self._groups)
        return PrefixHit(0, tuple([] for _ in range(empty)), (None,) * empty)

    def longest_hit(self, request: Request) -> int:
        """Tokens of the longest hit that the request could have; 0 for one that reads nothing from the cache."""
        reads = self._pool.enable_caching and not request.skip_prefix_cache_reads
        return self.aligned(len(request.token_ids) - 1) if reads else 0

    def cached_len(self, request: Request) -> int:
        """Tokens of a running request that stand in blocks which others can find."""
        return request.num_cached_blocks[0] * self._groups[0].block_size

    def is_new(self, request: Request) -> bool:
        """Whether the next block that a running request fills has a content that no block on the device has."""
        if not self._pool.enable_caching:
            return False
        size, index = self._groups[0].block_size, request.num_cached_blocks[0]
        tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
        extra = () if index else first_extra(request)
        node = self._pool.find(request.last_prefix_nodes[0], tokens, extra)
        return node is None or any(self._pool.block_of(node, group) is None for group in self._keyed)

    def num_findable(self, num_tokens: int) -> int:
        """Tokens that others find of `num_tokens` computed ones."""
        return self.aligned(min(group.num_stored_blocks(num_tokens) * group.block_size for group in self._groups))

    def aligned(self, num_tokens: int) -> int:
        """The longest length up to `num_tokens` at which a hit can end."""
        return num_tokens // self.alignment * self.alignment

    def _held(self, node: PrefixNode, group: int) -> int | None:
        """The block with a content, -1 where only host memory holds it, None where nothing does."""
        block = self._pool.block_of(node, group)
        return -1 if block is None and self._copies.lookup(node, group) is not None else block

    def _chain(self, request: Request, size: int, limit: int, invalid_nodes: set[int]) -> list[PrefixNode]:
        """The known contents of the request's first blocks of `size` tokens, at most `limit`."""
        tokens = np.frombuffer(request.token_ids[: limit * size], dtype=np.int32)
        chain = self._begun(request, size, tokens, invalid_nodes)
        find, node, extra = self._pool.find, chain[-1] if chain else None, () if chain else first_extra(request)
        for start in range(len(chain) * size, limit * size, size):
            node = find(node, tokens[start : start + size].tobytes(), extra)
            if node is None or node.uid in invalid_nodes:
                break
            chain.append(node)
            extra = ()
        self._last[size] = _LastChain(request.cache_salt, tokens[: len(chain) * size], chain.copy())
        return chain

    def _begun(self, request: Request, size: int, tokens: np.ndarray, invalid_nodes: set[int]) -> list[PrefixNode]:
        """The chain as far as the last one that was looked up goes the same way: a comparison in place of a hash for
        each block of what many requests begin with. There is never more than one living node of a content."""
        last = self._last.get(size)
        if last is None or last.salt != request.cache_salt:
            return []
        length = min(len(tokens), len(last.tokens))
        same = tokens[:length] == last.tokens[:length]
        nodes = last.nodes[: (length if same.all() else int(same.argmin())) // size]
        end = next((at for at, node in enumerate(nodes) if not node.alive or node.uid in invalid_nodes), len(nodes))
        return nodes[:end]

    def _common_length(self, tables: list[list[int | None]], length: int) -> int:
        """The longest length, in tokens, up to `length` that every group can serve."""
        while True:
            before = length
            for group, table in zip(self._groups, tables, strict=True):
                length = self._servable(group, table, length)
            if length == before:
                return length

    def _servable(self, group: KVGroup, table: list[int | None], length: int) -> int:
        """The longest aligned length up to `length` for which the group holds every block that a next token reads."""
        size = group.block_size
        needed = table if group.window is None else table[: group.num_kept_blocks(len(table))]
        missing = next((index for index, block in enumerate(needed) if block is None), None)
        length = length if missing is None else min(length, self.aligned(missing * size))
        if group.window is None:
            return length
        index = length // size - 1
        while length:
            first = group.first_needed_block(length)
            while index >= first and table[index] is not None:
                index -= 1
            if index < first:
                return length
            length = self.aligned(index * size)
            index = length // size - 1
        return 0

    def _hit(self, chains: dict[int, list[PrefixNode]], tables: list[list[int | None]], length: int) -> PrefixHit:
        blocks, last_prefix_nodes = [], []
        for group, table in zip(self._groups, tables, strict=True):
            first, end = group.first_needed_block(length), length // group.block_size
            kept = group.num_kept_blocks(first)
            read = [[block for block in some if block is not None] for some in (table[:kept], table[first:end])]
            blocks.append([*read[0], *[self._pool.null_block] * (first - kept), *read[1]])
            last_prefix_nodes.append(chains[group.block_size][end - 1])
        return PrefixHit(length, tuple(blocks), tuple(last_prefix_nodes))


def first_extra(request: Request) -> tuple[tuple[str, str], ...]:
    """What the key of a first block holds beside its tokens; it separates everything below."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)
