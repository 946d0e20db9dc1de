"""References to the blocks of a paged KV cache, and the content of blocks that a later sequence can reuse."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..errors import CapacityError, InvalidInputError
from .prefix_tree import Extra, PrefixNode, PrefixTree


class BlockPool:
    """Free list, reference counts and content of `num_blocks` cache blocks.

    A sequence allocates blocks, commits each one that is full and computed, and frees them. A freed block keeps its
    content until it is handed out again, least recently used first; `find` and `block_of` reach it until then, and
    `touch` takes it back into use. Every operation costs O(1) per block. Block ids are Python ints.

    `on_evict(block, node, group)`, where it is set, is called before a content is lost to a new owner of its block. Who
    copies the block elsewhere keeps its node findable by `retain`, until `release`.
    """

    null_block = 0
    """Stands for "no block" in a table: never allocated, freed or committed; skipped by `free`, `touch` and `fork`."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        digest: Callable[[bytes], int] | None = None,
        contents_of: BlockPool | None = None,
    ) -> None:
        """Make a pool of blocks 1 .. num_blocks - 1, all free, and the null block.

        Args:
            num_blocks: blocks of the cache, the null block included.
            enable_caching: False makes `commit` key nothing, so that `find` never finds.
            digest: the hash that chooses buckets; None is xxh3_64 with a seed from `os.urandom`. It affects no result.
            contents_of: the pool of another cache of the same sequences. A content is one node in both, which `find`
                and `block_of` of either reach; a KV cache group commits its blocks to one of them.

        Raises:
            InvalidInputError: fewer than two blocks.
        """
        if type(num_blocks) is not int or num_blocks < 2:
            raise InvalidInputError("num_blocks", "an int of at least 2", num_blocks, "block 0 is the null block")
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1
        self.enable_caching = enable_caching
        self.on_evict: Callable[[int, PrefixNode, int], None] | None = None
        self._contents = PrefixTree(digest) if contents_of is None else contents_of._contents
        self._refs = [1] + [0] * self.num_usable
        self._keys: dict[int, tuple[PrefixNode, int]] = {}  # block -> its content and KV cache group
        self._place = [0] * num_blocks  # of a keyed block in its node's list
        # The free list in two parts: blank blocks, taken first and from the end, then keyed ones, oldest first.
        self._blank = list(range(self.num_usable, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, with content or without."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """How many holders `block` has; the null block has one for ever."""
        if block != self.null_block:
            self._check_ids((block,))
        return self._refs[block]

    def num_evictable(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are unreferenced."""
        self._check_ids(blocks)
        refs = self._refs
        return sum(refs[block] == 0 for block in blocks)

    def allocate(self, n: int) -> list[int]:
        """Hand out `n` blocks with one reference each: blank ones first, then the least recently used are evicted.

        Raises:
            CapacityError: fewer than `n` are free; nothing is changed.
            InvalidInputError: `n` is no int or is negative.
        """
        if type(n) is not int or n < 0:
            raise InvalidInputError("n", "an int of at least 0", repr(n))
        if n > self.num_free:
            raise CapacityError(
                f"allocate needs {n} blocks, have {self.num_free} free of {self.num_usable}; "
                "free some or make the pool with more num_blocks"
            )
        num_blank = min(n, len(self._blank))
        blocks = [self._blank.pop() for _ in range(num_blank)] + [self._evict() for _ in range(n - num_blank)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each block, last block first, so that a table's tail is evicted before its head.

        Raises:
            InvalidInputError: an id is unknown, or listed more often than it is held (double free); nothing is changed.
        """
        held = self._check_held(blocks)
        for block in reversed(held):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block: a hit. Unreferenced blocks leave the free list and keep their content.

        Raises:
            InvalidInputError: an id is unknown, or a block is neither held nor has content; nothing is changed.
        """
        real, refs = [block for block in blocks if block != self.null_block], self._refs
        self._check_ids(real)
        for block in real:
            if refs[block] == 0 and block not in self._keys:
                raise InvalidInputError("blocks", "held or with content", f"{block}", "a blank block must be allocated")
        for block in real:
            if refs[block] == 0:
                del self._cached[block]
            refs[block] += 1

    share = touch

    def fork(self, blocks: Sequence[int], has_open_block: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Make a second table for the same content: full blocks are shared, an open last block gets a copy of its own.

        Args:
            blocks: the table to fork, every block held.
            has_open_block: whether the last block has room, so that both sequences will write there.

        Returns:
            The new table and the (source, destination) pairs to copy before the source is freed or either is written.

        Raises:
            CapacityError: no block is free for the copy; nothing is changed.
            InvalidInputError: a block is not held, or the block said to be open is missing; nothing is changed.
        """
        self._check_held(blocks)
        if has_open_block and (not blocks or blocks[-1] == self.null_block):
            raise InvalidInputError("blocks", "a table that ends in an open block", list(blocks[-1:]))
        copies = self.allocate(1) if has_open_block else []
        shared = list(blocks[: len(blocks) - len(copies)])
        self.touch(shared)
        return shared + copies, [(blocks[-1], copy) for copy in copies]

    def find(self, parent: PrefixNode | None, tokens: bytes, extra: Extra = ()) -> PrefixNode | None:
        """The living node of this content, or None, as `PrefixTree.find`."""
        return self._contents.find(parent, tokens, extra)

    def block_of(self, node: PrefixNode, group: int = 0) -> int | None:
        """A block that holds the content of `node` for the KV cache group, the same until its eviction, or None."""
        peers = node.blocks.get(group)
        return peers[0] if peers else None

    def commit(
        self, block: int, parent: PrefixNode | None, tokens: bytes, extra: Extra = (), group: int = 0
    ) -> PrefixNode:
        """Key a held block that is full and computed, so that others can find it; it is not written again.

        Takes the content as `find` does and the KV cache group whose layers wrote the block; groups never share blocks.
        Blocks of equal content share one node, which is returned: the parent of the next block. Ancestors that died
        when their blocks were evicted are replaced by their living equals or revived. A repeated commit is harmless.

        Raises:
            InvalidInputError: the block is null, unknown, not held or keyed with other content, or `tokens` is not
                bytes; nothing is changed.
        """
        self._check_ids((block,))
        if self._refs[block] == 0:
            raise InvalidInputError("block", "held by its writer", f"{block}, which is free", "commit before free")
        if type(tokens) is not bytes:
            raise InvalidInputError("tokens", "bytes of one block of int32", type(tokens).__name__, "use .tobytes()")
        if not self.enable_caching:
            return self._contents.new(parent, tokens, extra)
        living, dead = self._contents.resolve(parent)
        node = None if dead else self.find(living, tokens, extra)
        if block in self._keys:
            if node is not None and self._keys[block] == (node, group):
                return node
            raise InvalidInputError("block", "without other content", f"{block}, already keyed", "allocate a new block")
        if node is None:
            for ancestor in reversed(dead):
                living = self._contents.enter(ancestor, living)
            node = self._contents.enter(self._contents.new(living, tokens, extra), living)
        peers = node.blocks.setdefault(group, [])
        self._keys[block], self._place[block] = (node, group), len(peers)
        peers.append(block)
        return node

    def retain(self, node: PrefixNode) -> None:
        """Keep a living node findable, without a block too, until it is released as often."""
        node.num_copies += 1

    def release(self, node: PrefixNode) -> None:
        """Undo one `retain`."""
        node.num_copies -= 1
        self._contents.prune(node)

    def reset(self) -> bool:
        """Forget all content, as after a change of weights. False, and nothing done, while any block is held.

        What is retained elsewhere stays findable.
        """
        if self.num_free < self.num_usable:
            return False
        while self._cached:
            self._forget(self._cached.popitem(last=False)[0])
        self._blank = list(range(self.num_usable, 0, -1))
        return True

    def _check_ids(self, blocks: Iterable[int]) -> None:
        last = self.num_usable
        for block in blocks:
            if type(block) is not int or not 0 < block <= last:
                raise InvalidInputError("block", f"an int from 1 to {last}", repr(block))

    def _check_held(self, blocks: Sequence[int]) -> list[int]:
        """The blocks without null blocks, each known to be held at least as often as it is listed."""
        real = [block for block in blocks if block != self.null_block]
        counts = Counter(real)
        self._check_ids(counts)
        for block, times in counts.items():
            if self._refs[block] < times:
                got = f"block {block} {times} times with {self._refs[block]} references"
                raise InvalidInputError("blocks", "blocks that are held, each at most once per reference", got)
        return real

    def _evict(self) -> int:
        """Take the least recently used keyed block off the free list; its content cannot be found any more."""
        block, _ = self._cached.popitem(last=False)
        if self.on_evict is not None:
            self.on_evict(block, *self._keys[block])
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        node, group = self._keys.pop(block)
        peers = node.blocks[group]
        last, place = peers.pop(), self._place[block]
        if last != block:
            peers[place], self._place[last] = last, place
        if not peers:
            del node.blocks[group]
        self._contents.prune(node)
