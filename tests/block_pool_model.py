"""A block pool beside a naive model that remembers the real tokens written to every block.

Every answer of the pool is compared with the model's; a difference raises `InvariantError` with the invariant's number:

I1 the null block is always held and never free. I2 the free list has no block twice, its length is right. I3 references
of a block = its uses in tables and pins. I4 in the free list <=> no reference. I5 committed content is found. I6 found
content is exactly what was asked for, all ancestors and the group included. I7 an open block has one holder and no key,
a shared block is never written. I8 no block is handed out twice, no table holds one twice. I10 LRU with leaves first;
evicted content is unreachable at once. I11 a failed allocation changes nothing. I14 an idle pool is whole, a reset one
empty. I15 misuse raises and changes nothing. I16 salts never share. (I17, one trace per seed, compares `trace`.)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from pagedattn.cache.block_pool import BlockPool, PrefixNode
from pagedattn.errors import CapacityError

GROUPS = 2

Extra = tuple[tuple[str, int], ...]
Chain = tuple[tuple[Extra, tuple[int, ...]], ...]  # per block its extra and tokens, all ancestors included
Content = tuple[int, Chain]  # KV cache group, chain

SALTS: tuple[Extra, ...] = ((), (("salt", 1),), (("salt", 2),))
BLOCKS = [(a, b) for a in range(2) for b in range(2)]  # two tokens of a vocabulary of two


class InvariantError(AssertionError):
    """The pool and the model differ."""


def require(condition: bool, invariant: str, *detail: object) -> None:
    if not condition:
        raise InvariantError(f"{invariant}: {' '.join(map(str, detail))}")


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def put(pool: BlockPool, *contents: bytes, extra: tuple[tuple[str, object], ...] = (), group: int = 0) -> list[int]:
    """A table whose blocks are committed with `contents` as one chain; `extra` is in the first block's key."""
    table, node = pool.allocate(len(contents)), None
    for at, (block, tokens) in enumerate(zip(table, contents, strict=True)):
        node = pool.commit(block, node, tokens, () if at else extra, group)
    return table


def get(pool: BlockPool, *contents: bytes, extra: tuple[tuple[str, object], ...] = (), group: int = 0) -> list[int]:
    """The blocks found for a chain, up to the first that is missing."""
    table, node = [], None
    for at, tokens in enumerate(contents):
        node = pool.find(node, tokens, () if at else extra)
        block = None if node is None else pool.block_of(node, group)
        if block is None:
            break
        table.append(block)
    return table


class PoolModel:
    """What a pool must do, with plain lists and scans."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.memory: dict[int, Content] = {}
        self.keys: dict[int, Content] = {}

    def allocate(self, n: int) -> list[int]:
        blocks, self.free = self.free[:n], self.free[n:]
        for block in blocks:
            self.refs[block] = 1
            self.keys.pop(block, None)
            self.memory.pop(block, None)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed([block for block in blocks if block]):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.insert(len(self.free) if block in self.keys else 0, block)

    def hold(self, blocks: Sequence[int]) -> None:
        for block in [block for block in blocks if block]:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def residents(self, content: Content) -> list[int]:
        return [block for block, key in self.keys.items() if key == content]

    def lives(self, chain: Chain) -> bool:
        return any(key[: len(chain)] == chain for _, key in self.keys.values())


class CheckedPool:
    """A pool and its model: does each call on both; `counts` says what really happened."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.model = pool, PoolModel(pool.num_blocks)
        self.counts: Counter[str] = Counter()
        self.trace: list[list[int]] = []

    def allocate(self, n: int) -> list[int] | None:
        """None, and nothing changed, where the pool is too small."""
        if n > len(self.model.free):
            return self.refuse("I11", CapacityError, lambda: self.pool.allocate(n))
        self.counts["evictions"] += sum(block in self.model.keys for block in self.model.free[:n])
        expected = self.model.allocate(n)
        got = self.pool.allocate(n)
        self.trace.append(got)
        require(len(set(got)) == len(got), "I8", "handed out twice:", got)
        require(got == expected, "I10", "allocated", got, "expected", expected)
        return got

    def free(self, blocks: list[int]) -> None:
        self.model.release(blocks)
        self.pool.free(blocks)

    def touch(self, blocks: list[int]) -> None:
        self.model.hold(blocks)
        self.pool.touch(blocks)

    def fork(self, row: list[int], is_open: bool) -> list[int] | None:
        """The second row, written like the first; None where no block is free for the copy."""
        if is_open and not self.model.free:
            return self.refuse("I11", CapacityError, lambda: self.pool.fork(row, True))
        copies = self.model.allocate(1) if is_open else []
        shared = row[: len(row) - len(copies)]
        self.model.hold(shared)
        pairs = [(row[-1], copy) for copy in copies]
        got = self.pool.fork(row, is_open)
        require(got == (shared + copies, pairs), "I7", "fork of", row, "gave", got, "expected copies", pairs)
        self.counts["copies"] += len(pairs)
        for source, copy in pairs:
            self.model.memory[copy] = self.model.memory[source]
        return got[0]

    def write(self, block: int, content: Content) -> None:
        """What the model runner does: put the KV of `content` into a block it holds alone."""
        require(self.pool.ref_count(block) == 1 and block not in self.model.keys, "I7", "write to shared", block)
        self.model.memory[block] = content

    def commit(self, block: int, parent: PrefixNode | None, chain: Chain, group: int) -> PrefixNode:
        model, content = self.model, (group, chain)
        if parent is not None and not parent.alive:
            self.counts["replaced" if model.lives(chain[:-1]) else "revived"] += 1
        self.counts["duplicates"] += block not in model.keys and bool(model.residents(content))
        extra, tokens = chain[-1]
        node = self.pool.commit(block, parent, pack(tokens), extra, group)
        model.keys[block] = content
        require(node is self.walk(chain), "I5", "another node from the root for", chain)
        self.expect(node, chain)
        return node

    def walk(self, chain: Chain) -> PrefixNode | None:
        node = None
        for extra, tokens in chain:
            node = self.pool.find(node, pack(tokens), extra)
            if node is None:
                break
        return node

    def expect(self, node: PrefixNode | None, chain: Chain) -> list[int | None]:
        """`node` is what the pool found for `chain`: check it; returns its block per group."""
        model = self.model
        found = [None if node is None else self.pool.block_of(node, group) for group in range(GROUPS)]
        for group, block in enumerate(found):
            wanted = (group, chain)
            require(block is not None or not model.residents(wanted), "I5", "not found:", wanted)
            if block is None:
                continue
            require(block in model.keys, "I10", "block", block, "still found under evicted", wanted)
            held = model.memory[block]
            unsalted = [tokens for _, tokens in held[1]] == [tokens for _, tokens in chain]
            require(held[1] == chain or not unsalted, "I16", "block", block, "holds", held, "wanted", wanted)
            require(held == model.keys[block] == wanted, "I6", "block", block, "holds", held, "wanted", wanted)
        require((node is not None) == model.lives(chain), "I10" if node else "I5", chain, "found as", node)
        return found

    def refuse(self, invariant: str, error: type[Exception], call: Callable[[], object]) -> None:
        """`call` raises `error` and leaves everything as it was."""
        self.counts[error.__name__] += 1
        try:
            call()
        except error:
            try:
                self.check_counters()
                self.check_blocks()
                self.check_contents()
            except InvariantError as change:
                raise InvariantError(f"{invariant}: refused, but {change}") from change
        else:
            require(False, invariant, "not refused with", error.__name__)

    def check_counters(self) -> None:
        cached = sum(block in self.model.keys for block in self.model.free)
        require(self.pool.num_free == len(self.model.free), "I2", "num_free", self.pool.num_free)
        require(self.pool.num_cached == cached, "I2", "num_cached", self.pool.num_cached, "not", cached)

    def check_blocks(self) -> None:
        pool, model = self.pool, self.model
        listed = [*reversed(pool._blank), *pool._cached]
        require(len(set(listed)) == len(listed), "I2", "twice in the free list", listed)
        require(pool.ref_count(pool.null_block) == 1 and pool.null_block not in listed, "I1", "null block")
        for block in range(1, pool.num_blocks):
            refs = pool.ref_count(block)
            require((refs == 0) == (block in listed), "I4", "block", block, "with references", refs)
            require(refs == model.refs[block], "I3", "block", block, "with references", refs)
        require(listed == model.free, "I10", "free list", listed, "not", model.free)

    def check_contents(self) -> None:
        """Every living content is found, and from no living content any other can be reached."""
        chains = {chain[:n] for _, chain in self.model.keys.values() for n in range(1, len(chain) + 1)}
        nodes: dict[Chain, PrefixNode | None] = {(): None}
        for chain in sorted(chains, key=len):
            extra, tokens = chain[-1]
            nodes[chain] = node = self.pool.find(nodes[chain[:-1]], pack(tokens), extra)
            self.expect(node, chain)
            require(node is not None and node.parent is nodes[chain[:-1]], "I6", chain, "has another parent")
        require(len({node.uid for node in nodes.values() if node}) == len(chains), "I6", "one node for two contents")
        for chain, node in nodes.items():
            for extra in () if chain else SALTS:
                for tokens in BLOCKS:
                    other, found = (*chain, (extra, tokens)), self.pool.find(node, pack(tokens), extra)
                    if found is not None and other not in chains:
                        self.expect(found, other)
