"""Sequences on a checked block pool: one method per kind of operation, each with two ints that choose what it does.

A random loop (`run`) and a hypothesis machine drive the same methods. `block_pool_model` has the invariants.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from block_pool_model import BLOCKS, GROUPS, SALTS, Chain, CheckedPool, Extra, PoolModel, pack, require

from pagedattn.cache.block_pool import BlockPool, PrefixNode
from pagedattn.errors import InvalidInputError

BLOCK_SIZE, MAX_TOKENS, MAX_TABLES = 2, 14, 6
WEIGHTS = {
    "add": 20, "grow": 20, "commit": 20, "fork": 6, "finish": 12, "slide": 5, "pin": 4, "unpin": 4, "graft": 6,
    "lookup": 6, "evict_all": 1, "pressure": 1, "relax": 6, "reset": 1, "drain": 1, "misuse": 3,
}  # fmt: skip


@dataclass(eq=False)
class Table:
    """One sequence: its tokens, a row of blocks per group, and the nodes of the blocks committed so far."""

    tokens: list[int]
    salt: Extra
    rows: list[list[int]]
    nodes: list[PrefixNode] = field(default_factory=list)

    @property
    def chain(self) -> Chain:
        starts = range(0, len(self.tokens), BLOCK_SIZE)
        return tuple((() if at else self.salt, tuple(self.tokens[at : at + BLOCK_SIZE])) for at in starts)

    @property
    def is_open(self) -> bool:
        return len(self.tokens) % BLOCK_SIZE != 0


class PoolMachine:
    def __init__(self, pool: BlockPool) -> None:
        self.checked = CheckedPool(pool)
        self.counts = self.checked.counts
        self.tables: list[Table] = []
        self.pins: list[int] = []
        self.ballast: list[int] = []
        self.history: deque[tuple[list[int], Extra]] = deque([([0] * MAX_TOKENS, ())], maxlen=12)
        self.remembered: deque[tuple[PrefixNode, Chain]] = deque(maxlen=16)

    def run(self, seed: int, operations: int, check_every: int) -> None:
        rng = random.Random(seed)
        for number, name in enumerate(rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations)):
            self.step(name, rng.getrandbits(20), rng.getrandbits(20))
            if number % check_every == 0:
                self.check()

    def step(self, operation: str, a: int, b: int) -> None:
        self.counts[operation] += 1
        getattr(self, operation)(a, b)
        self.checked.check_counters()

    def check(self) -> None:
        """All invariants, those of the tables included."""
        uses = Counter(block for table in self.tables for row in table.rows for block in row)
        uses.update(self.pins + self.ballast)
        model = self.checked.model
        require(all(uses[block] == refs for block, refs in enumerate(model.refs) if block), "I3", "uses", uses)
        for table in self.tables:
            for group, row in enumerate(table.rows):
                real = [block for block in row if block]
                require(len(set(real)) == len(real), "I8", "table", row)
                for at, block in enumerate(row):
                    intact = not block or model.memory[block] == (group, table.chain[: at + 1])
                    require(intact, "I7", "overwritten:", block, "of", row)
                if table.is_open:
                    require(uses[row[-1]] == 1 and row[-1] not in model.keys, "I7", "shared open block of", row)
        self.checked.check_blocks()
        self.checked.check_contents()

    def add(self, a: int, b: int) -> None:
        """A new sequence, often with a prefix of an earlier one: look up, touch the hits, allocate the rest."""
        if len(self.tables) == MAX_TABLES:
            return self.finish(a, b)
        tokens, salt = [b >> i & 1 for i in range(1 + a % MAX_TOKENS)], SALTS[b % 3]
        if b % 4:
            prefix, salt = self.history[a // MAX_TOKENS % len(self.history)]
            tokens[: len(prefix)] = prefix[: len(tokens)]
        self.history.append((tokens, salt))
        table = self._look_up(tokens, salt)
        hits = [block for row in table.rows for block in row]
        self.checked.touch(hits)
        num_new = len(table.chain) - len(table.nodes)
        blocks = self.checked.allocate(num_new * GROUPS)
        if blocks is None:
            return self.checked.free(hits)
        self.counts["hits"] += len(hits)
        self.counts["salted_hits"] += len(hits) if salt else 0
        for group, row in enumerate(table.rows):
            row += blocks[group * num_new : (group + 1) * num_new]
        self._write(table, len(table.nodes))
        self.tables.append(table)

    def grow(self, a: int, b: int) -> None:
        """Append up to four tokens, with new blocks where the last ones are full."""
        for table in self._chosen(a):
            for i in range(min(1 + b % 4, MAX_TOKENS - len(table.tokens))):
                if not table.is_open:
                    blocks = self.checked.allocate(GROUPS)
                    if blocks is None:
                        return
                    for row, block in zip(table.rows, blocks, strict=True):
                        row.append(block)
                table.tokens.append(b >> i + 2 & 1)
                self._write(table, len(table.chain) - 1)

    def commit(self, a: int, b: int) -> None:
        """Key some of the full blocks that are not keyed yet, in every group."""
        for table in self._chosen(a):
            first, num_full = len(table.nodes), len(table.tokens) // BLOCK_SIZE
            for at in range(first, min(num_full, first + 1 + b % 3)):
                parent = table.nodes[-1] if table.nodes else None
                chain = table.chain[: at + 1]
                nodes = [self.checked.commit(row[at], parent, chain, group) for group, row in enumerate(table.rows)]
                table.nodes.append(nodes[0])
                self.remembered.append((nodes[0], chain))

    def fork(self, a: int, b: int) -> None:
        for table in self._chosen(a):
            rows: list[list[int]] = []
            for row in table.rows:
                copy = self.checked.fork(row, table.is_open)
                if copy is None:
                    return self.checked.free([block for done in rows for block in done])
                rows.append(copy)
            self.tables.append(Table(list(table.tokens), table.salt, rows, list(table.nodes)))

    def finish(self, a: int, b: int) -> None:
        for table in self._chosen(a):
            self.tables.remove(table)
            for row in table.rows:
                self.checked.free(row)

    def slide(self, a: int, b: int) -> None:
        """A window passes over committed blocks: null blocks take their places, in one group or in all."""
        for table in self._chosen(a):
            passed = min(1 + b // 2 % 5, len(table.nodes))
            for row in table.rows[b % 2 :]:
                self.checked.free(row[:passed])
                self.counts["slid"] += sum(block != 0 for block in row[:passed])
                row[:passed] = [0] * passed

    def pin(self, a: int, b: int) -> None:
        keyed = sorted(self.checked.model.keys)
        if keyed:
            self.pins.append(keyed[a % len(keyed)])
            self.checked.touch(self.pins[-1:])

    def unpin(self, a: int, b: int) -> None:
        if self.pins:
            self.checked.free([self.pins.pop(a % len(self.pins))])

    def graft(self, a: int, b: int) -> None:
        """Commit one block under a node remembered from earlier, which may be dead or have a living equal."""
        if not self.remembered:
            return
        parent, chain = self.remembered[a % len(self.remembered)]
        blocks = self.checked.allocate(1) if len(chain) < MAX_TOKENS else None
        if blocks is not None:
            group, extra = b % GROUPS, (("image", 1),) if b % 16 < 4 else ()
            chain = (*chain, (extra, BLOCKS[b // 16 % 4]))
            self.checked.write(blocks[0], (group, chain))
            self.remembered.append((self.checked.commit(blocks[0], parent, chain, group), chain))
            self.checked.free(blocks)

    def lookup(self, a: int, b: int) -> None:
        tokens, salt = self.history[a % len(self.history)]
        self._look_up(tokens, SALTS[b % 3] if b & 64 else salt)

    def evict_all(self, a: int, b: int) -> None:
        blocks = self.checked.allocate(len(self.checked.model.free)) or []
        require(self.checked.pool.num_cached == self.checked.pool.num_free == 0, "I2", "blocks are left")
        self.checked.free(blocks)

    def pressure(self, a: int, b: int) -> None:
        self.ballast += self.checked.allocate(max(0, len(self.checked.model.free) - a % 4)) or []

    def relax(self, a: int, b: int) -> None:
        self.checked.free(self.ballast)
        self.ballast = []

    def reset(self, a: int, b: int) -> None:
        pool, idle = self.checked.pool, not any(self.checked.model.refs)
        require(pool.reset() is idle, "I14", "reset with references", self.checked.model.refs)
        self.counts["reset_done" if idle else "reset_refused"] += 1
        if idle:
            self.checked.model = PoolModel(pool.num_blocks)
            require(pool.num_cached == 0 and pool.num_free == pool.num_usable, "I14", "content after reset")
            self.check()

    def drain(self, a: int, b: int) -> None:
        """Everything ends: no block may be missing."""
        while self.tables:
            self.finish(a, b)
        self.checked.free(self.pins)
        self.pins = []
        self.relax(a, b)
        require(self.checked.pool.num_free == self.checked.pool.num_usable, "I14", "blocks were lost")
        if b % 2:
            self.reset(a, b)

    def misuse(self, a: int, b: int) -> None:
        """A call that must be refused, valid blocks first so that a half-done call shows."""
        pool, model = self.checked.pool, self.checked.model
        held = [block for block, refs in enumerate(model.refs) if refs]
        parent = self.remembered[a % len(self.remembered)][0] if self.remembered else None
        calls: list[Callable[[], object]] = [
            lambda: pool.free([*held, pool.num_blocks]),
            lambda: pool.touch([*held, -1]),
            lambda: pool.allocate(-1),
            lambda: pool.fork([], True),
            lambda: pool.commit(pool.null_block, parent, pack((0, 0))),
        ]
        if model.free:
            free = model.free[-1]
            calls += [
                lambda: pool.free([*held, free]),
                lambda: pool.fork([*held, free], False),
                lambda: pool.commit(free, parent, pack((0, 0))),
            ]
        if model.free and model.free[0] not in model.keys:
            calls.append(lambda: pool.touch([*held, model.free[0]]))
        if held:
            calls.append(lambda: pool.free(held + held[:1] * model.refs[held[0]]))
        keyed = [block for block in held if block in model.keys]
        if keyed:
            calls.append(lambda: pool.commit(keyed[0], parent, pack((7, 7))))
        self.checked.refuse("I15", InvalidInputError, calls[b % len(calls)])

    def _chosen(self, a: int) -> list[Table]:
        return [self.tables[a % len(self.tables)]] if self.tables else []

    def _write(self, table: Table, first: int) -> None:
        for at in range(first, len(table.chain)):
            for group, row in enumerate(table.rows):
                self.checked.write(row[at], (group, table.chain[: at + 1]))

    def _look_up(self, tokens: list[int], salt: Extra) -> Table:
        """A table that holds the blocks found for all but the last token; they are not touched yet."""
        table = Table(list(tokens), salt, [[] for _ in range(GROUPS)])
        node, chain = None, table.chain
        for at in range((len(tokens) - 1) // BLOCK_SIZE):
            extra, block_tokens = chain[at]
            node = self.checked.pool.find(node, pack(block_tokens), extra)
            found = self.checked.expect(node, chain[: at + 1])
            if node is None or None in found:
                break
            for row, block in zip(table.rows, found, strict=True):
                row.append(block or 0)
            table.nodes.append(node)
        return table
