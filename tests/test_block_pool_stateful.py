"""The block pool against a naive model: by hypothesis, by a long random run, and with planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash
from block_pool_machine import WEIGHTS, PoolMachine
from block_pool_model import InvariantError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from random_work import part_of

from pagedattn.cache.block_pool import BlockPool
from pagedattn.cache.prefix_tree import PrefixNode, PrefixTree
from pagedattn.errors import CapacityError

SHARE = 5

NUM_BLOCKS = 33
HAPPENED = ("hits", "salted_hits", "evictions", "duplicates", "copies", "slid", "revived", "replaced")
REFUSED = ("CapacityError", "InvalidInputError", "reset_refused", "reset_done")


class FourBitDigest:
    """A digest with 16 values that counts how often it gave two inputs the same one."""

    def __init__(self) -> None:
        self.collisions = 0
        self._last: dict[int, bytes] = {}

    def __call__(self, data: bytes) -> int:
        digest = xxhash.xxh3_64_intdigest(data) & 15
        self.collisions += self._last.get(digest, data) != data
        self._last[digest] = data
        return digest


def operation(name: str) -> Any:
    def run(self: PoolRules, a: int, b: int) -> None:
        self.machine.step(name, a, b)

    run.__name__ = name
    return rule(a=st.integers(0, 2**16 - 1), b=st.integers(0, 2**16 - 1))(run)


class PoolRules(RuleBasedStateMachine):
    def __init__(self, digest: Callable[[bytes], int] | None, total: Counter[str]) -> None:
        super().__init__()
        self.machine, self.total = PoolMachine(BlockPool(NUM_BLOCKS, digest=digest)), total

    add = operation("add")
    add_another = operation("add")
    grow = operation("grow")
    commit = operation("commit")
    commit_more = operation("commit")
    fork = operation("fork")
    finish = operation("finish")
    slide = operation("slide")
    pin = operation("pin")
    unpin = operation("unpin")
    graft = operation("graft")
    lookup = operation("lookup")
    evict_all = operation("evict_all")
    pressure = operation("pressure")
    relax = operation("relax")
    reset = operation("reset")
    drain = operation("drain")
    misuse = operation("misuse")

    @invariant()
    def pool_equals_model(self) -> None:
        self.machine.check()

    def teardown(self) -> None:
        self.machine.drain(0, 1)
        self.total.update(self.machine.counts)


@pytest.mark.parametrize("digest", [None, FourBitDigest()], ids=["xxh3", "4bit"])
def test_hypothesis_finds_no_difference_from_the_model(digest: FourBitDigest | None) -> None:
    total: Counter[str] = Counter()

    class Rules(PoolRules):
        def __init__(self) -> None:
            super().__init__(digest, total)

    budget = settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=part_of(60, 3),
        stateful_step_count=60,
    )
    run_state_machine_as_test(Rules, settings=budget)
    # What hypothesis draws depends on the constants of all loaded modules; how many are the next test's to count.
    assert not [name for name in (*WEIGHTS, "hits") if not total[name]]
    assert digest is None or digest.collisions


@pytest.mark.parametrize("digest", [None, FourBitDigest()], ids=["xxh3", "4bit"])
def test_random_operations_agree_with_the_model(digest: FourBitDigest | None) -> None:
    machine = PoolMachine(BlockPool(NUM_BLOCKS, digest=digest))
    machine.run(seed=20260801, operations=part_of(100_000, SHARE), check_every=24)
    machine.drain(0, 1)
    rare = {
        name: machine.counts[name]
        for name in (*WEIGHTS, *HAPPENED, *REFUSED)
        if machine.counts[name] < part_of(50, SHARE)
    }
    assert not rare
    assert digest is None or digest.collisions > part_of(100_000, SHARE)


def test_the_same_seed_gives_the_same_trace_whatever_the_digest() -> None:
    machines = [PoolMachine(BlockPool(NUM_BLOCKS, digest=digest)) for digest in (None, None, FourBitDigest(), len)]
    for machine in machines:
        machine.run(seed=7, operations=3000, check_every=100)
    first, *others = [(machine.checked.trace, machine.counts) for machine in machines]
    assert len(first[0]) > 500
    assert all(other == first for other in others)


class KeyWithoutParent(BlockPool):
    def find(self, parent: PrefixNode | None, tokens: bytes, extra: tuple[Any, ...] = ()) -> PrefixNode | None:
        nodes = (node for bucket in self._contents._buckets.values() for node in bucket)
        return next((node for node in nodes if (node.tokens, node.extra) == (tokens, extra)), None)


class KeyWithoutExtra(BlockPool):
    def find(self, parent: PrefixNode | None, tokens: bytes, extra: tuple[Any, ...] = ()) -> PrefixNode | None:
        nodes = (node for bucket in self._contents._buckets.values() for node in bucket)
        return next((node for node in nodes if (node.tokens, node.parent) == (tokens, parent)), None)


class KeyWithoutGroup(BlockPool):
    def block_of(self, node: PrefixNode, group: int = 0) -> int | None:
        return next((block for peers in node.blocks.values() for block in peers), None)


class FreeHeadFirst(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks[::-1])


class EvictNewest(BlockPool):
    def _evict(self) -> int:
        self._cached.move_to_end(next(reversed(self._cached)), last=False)
        return super()._evict()


class StaleKeyAfterReuse(BlockPool):
    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._keys[block]
        return block


class EvictDuplicatesToo(BlockPool):
    def _evict(self) -> int:
        node, group = self._keys[next(iter(self._cached))]
        block = super()._evict()
        node.blocks.pop(group, None)
        return block


class BrokenContents(BlockPool):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._contents.__class__ = self.contents

    contents: type[PrefixTree]


class NodesNeverDie(BrokenContents):
    class contents(PrefixTree):
        def prune(self, node: PrefixNode | None) -> None:
            pass


class NodesDieBeforeTheirChildren(BrokenContents):
    class contents(PrefixTree):
        def prune(self, node: PrefixNode | None) -> None:
            if node is not None and not node.blocks:
                self._buckets[node.digest].remove(node)


class DeadParentsStayDead(BrokenContents):
    class contents(PrefixTree):
        def resolve(self, node: PrefixNode | None) -> tuple[PrefixNode | None, list[PrefixNode]]:
            return node, []


class OpenBlockShared(BlockPool):
    def fork(self, blocks: Sequence[int], has_open_block: bool) -> tuple[list[int], list[tuple[int, int]]]:
        return super().fork(blocks, False)


class ForkWithoutReferences(BlockPool):
    def fork(self, blocks: Sequence[int], has_open_block: bool) -> tuple[list[int], list[tuple[int, int]]]:
        table, pairs = super().fork(blocks, has_open_block)
        self.free(table[: len(table) - len(pairs)])
        return table, pairs


class HitStaysInFreeList(BlockPool):
    def touch(self, blocks: Sequence[int]) -> None:
        free = [block for block in blocks if self._refs[block] == 0]
        super().touch(blocks)
        self._cached.update(dict.fromkeys(free))


class HitTakesAnotherOffTheFreeList(BlockPool):
    def touch(self, blocks: Sequence[int]) -> None:
        free = [block for block in blocks if self._refs[block] == 0]
        super().touch(blocks)
        if free and self._cached:
            self._cached.popitem(last=False)
            self._cached[free[0]] = None


class OneBlockHandedOutTwice(BlockPool):
    def allocate(self, n: int) -> list[int]:
        return [block for block in super().allocate(n) for _ in range(2)][:n]


class NullBlockFreed(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        self._refs[0] -= 0 in blocks


class PartOfAnAllocation(BlockPool):
    def allocate(self, n: int) -> list[int]:
        if n > self.num_free:
            super().allocate(self.num_free)
            raise CapacityError("full")
        return super().allocate(n)


class DoubleFreeIgnored(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        super().free([block for block in blocks if 0 < block < self.num_blocks and self._refs[block]])


class PartOfAFree(BlockPool):
    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            super().free([block])


class ResetInUse(BlockPool):
    def reset(self) -> bool:
        super().reset()
        return True


class ResetKeepsContent(BlockPool):
    def reset(self) -> bool:
        return self.num_free == self.num_usable


FAULTS = {
    KeyWithoutParent: "I6",
    KeyWithoutExtra: "I16",
    KeyWithoutGroup: "I6",
    FreeHeadFirst: "I10",
    EvictNewest: "I10",
    StaleKeyAfterReuse: "I10",
    EvictDuplicatesToo: "I5",
    NodesNeverDie: "I10",
    NodesDieBeforeTheirChildren: "I5",
    DeadParentsStayDead: "I5",
    OpenBlockShared: "I7",
    ForkWithoutReferences: "I3",
    HitStaysInFreeList: "I2",
    HitTakesAnotherOffTheFreeList: "I4",
    OneBlockHandedOutTwice: "I8",
    NullBlockFreed: "I1",
    PartOfAnAllocation: "I11",
    DoubleFreeIgnored: "I15",
    PartOfAFree: "I15",
    ResetInUse: "I14",
    ResetKeepsContent: "I14",
}


@pytest.mark.parametrize(("faulty", "broken"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_planted_fault_breaks_its_invariant(faulty: type[BlockPool], broken: str) -> None:
    with pytest.raises(InvariantError, match=f"^{broken}:"):
        PoolMachine(faulty(NUM_BLOCKS)).run(seed=1, operations=5000, check_every=1)
