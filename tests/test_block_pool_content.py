"""BlockPool: which content is found, and that no other content is ever found in its place."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
import xxhash
from block_pool_model import get, pack, put

from pagedattn.cache.block_pool import BlockPool
from pagedattn.cache.prefix_tree import PrefixNode, PrefixTree
from pagedattn.errors import InvalidInputError

A, B, C, D = (pack((i, i + 1)) for i in range(4))


def test_content_is_found_by_every_part_of_its_key() -> None:
    pool = BlockPool(9)
    table = put(pool, A, B, C)
    assert get(pool, A, B, C) == table
    assert get(pool, A, C) == table[:1]
    assert get(pool, B) == get(pool, A + B) == get(pool, A[:4]) == []
    inner = pool.allocate(1)[0]
    first = pool.find(None, A)
    node = pool.commit(inner, first, B, (("image", 1),))
    assert pool.block_of(node) == inner
    assert pool.find(first, B, (("image", 1),)) is node
    assert pool.find(first, B) is not node
    assert node.parent is first


@pytest.mark.parametrize("digest", [None, lambda data: 0], ids=["xxh3", "constant"])
def test_salts_never_share(digest: Callable[[bytes], int] | None) -> None:
    pool = BlockPool(9, digest=digest)
    tables = {salt: put(pool, A, B, extra=salt) for salt in ((), (("salt", "x"),), (("salt", "y"),))}
    assert len({block for table in tables.values() for block in table}) == 6
    assert all(get(pool, A, B, extra=salt) == table for salt, table in tables.items())
    assert get(pool, A, B, extra=(("salt", "z"),)) == get(pool, A, B, extra=(("adapter", "x"),)) == []


def test_groups_share_nodes_and_never_blocks() -> None:
    pool = BlockPool(9)
    first, second = put(pool, A, B), put(pool, A, B, group=1)
    assert get(pool, A, B) == first
    assert get(pool, A, B, group=1) == second
    assert get(pool, A, B, group=2) == []
    pool.free(first)
    pool.allocate(pool.num_free)
    assert get(pool, A, B) == []
    assert get(pool, A, B, group=1) == second


def test_duplicates_hang_on_one_node_and_take_over_from_each_other() -> None:
    pool = BlockPool(4)
    blocks = [put(pool, A)[0] for _ in range(3)]
    node = pool.find(None, A)
    assert node is not None
    for left in (3, 2, 1):
        block = pool.block_of(node)
        assert block in blocks
        assert pool.block_of(node) == block
        pool.free([block])
        assert get(pool, A) == [block]
        assert pool.allocate(1) == [block]
        blocks.remove(block)
        assert len(blocks) == left - 1
    assert pool.find(None, A) is pool.block_of(node) is None


def test_evicted_content_is_unreachable_at_once() -> None:
    pool = BlockPool(4)
    table = put(pool, A, B, C)
    pool.free(table)
    assert pool.allocate(1) == [table[2]]
    assert get(pool, A, B, C) == table[:2]
    pool.allocate(2)
    assert pool.find(None, A) is None
    assert pool.num_cached == 0


def test_a_chain_lives_while_a_later_block_does() -> None:
    pool = BlockPool(4)
    table = put(pool, A, B, C)
    pool.free(table[:2])
    pool.allocate(2)
    nodes: list[PrefixNode | None] = [None]
    for tokens in (A, B, C):
        nodes.append(pool.find(nodes[-1], tokens))
    assert [node and pool.block_of(node) for node in nodes] == [None, None, None, table[2]]


def test_dead_ancestors_are_revived() -> None:
    pool = BlockPool(6)
    table = put(pool, A, B, C)
    parent = pool.find(pool.find(pool.find(None, A), B), C)
    assert parent is not None
    pool.free(table)
    last = pool.allocate(5)[0]
    assert pool.find(None, A) is None
    node = pool.commit(last, parent, D)
    assert node.parent is parent
    assert pool.find(pool.find(pool.find(pool.find(None, A), B), C), D) is node
    assert pool.block_of(parent) is None


def test_a_dead_parent_is_replaced_by_its_living_equal() -> None:
    pool = BlockPool(4)
    table = put(pool, A)
    dead = pool.find(None, A)
    pool.free(table)
    pool.free(pool.allocate(3))
    first, second = *put(pool, A), pool.allocate(1)[0]
    node = pool.commit(second, dead, B)
    assert node.parent is pool.find(None, A) is not dead
    assert get(pool, A, B) == [first, second]


def test_dead_ancestors_are_replaced_by_their_living_equals() -> None:
    pool = BlockPool(6)
    table = put(pool, A, B)
    dead = pool.find(pool.find(None, A), B)
    pool.free(table)
    block = pool.allocate(5)[0]
    pool.free([other for other in range(1, 6) if other != block])
    new = put(pool, A)
    living = pool.find(None, A)
    node = pool.commit(block, dead, C)
    assert node.parent is dead
    assert dead is not None
    assert dead.parent is living
    assert get(pool, A) == new
    again = put(pool, A, B, C)
    assert pool.find(dead, C) is node
    assert get(pool, A, B, C) == [new[0], again[1], block]


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_two_blocks_of_equal_xxh64_never_share(block_size: int) -> None:
    """Found by a birthday search on one lane of xxh64 with seed 0, over int64 tokens."""
    rng, digests = random.Random(block_size), {}

    def xxh64(data: bytes) -> int:
        return digests.setdefault(data, xxhash.xxh64_intdigest(data, seed=0))

    filler = [rng.randrange(65536) for _ in range(block_size)]
    blocks = []
    for colliding in ([50095, 31566, 2943, 45409], [39345, 46709, 11617, 14253]):
        filler[0:16:4] = colliding
        blocks.append(array("q", filler).tobytes())
    first, second = blocks
    assert first != second
    assert xxhash.xxh64_intdigest(first, seed=0) == xxhash.xxh64_intdigest(second, seed=0)
    pool = BlockPool(9, digest=xxh64)
    victim = put(pool, first, A)
    assert get(pool, second, A) == []
    attacker = put(pool, second)
    assert get(pool, second, A) == attacker
    assert get(pool, first, A) == victim
    assert len(set(digests.values())) < len(digests)


@pytest.mark.parametrize("digest", [None, lambda data: 0], ids=["xxh3", "constant"])
def test_a_suffix_is_not_taken_from_under_another_prefix(digest: Callable[[bytes], int] | None) -> None:
    """P + S, then P', then P' + S, where P and P' have one hash: S under P' was never computed."""
    pool = BlockPool(9, digest=digest)
    prefix, other, suffix = A, B, C
    victim = put(pool, prefix, suffix)
    attacker = put(pool, other)
    assert get(pool, other, suffix) == attacker
    pool.free(victim)
    pool.free(attacker)
    assert get(pool, other, suffix) == attacker
    assert get(pool, prefix, suffix) == victim


def test_the_default_digest_has_a_seed_of_its_own() -> None:
    assert PrefixTree()._digest(b"tokens") != PrefixTree()._digest(b"tokens")


def test_equal_tokens_under_many_parents_and_salts_do_not_crowd_one_bucket() -> None:
    pool = BlockPool(2001)
    put(pool, *[A] * 1000)
    for salt in range(1000):
        put(pool, A, extra=(("salt", salt),))
    assert len(pool._contents._buckets) == 2000


def test_a_commit_is_refused_where_the_block_is_not_the_callers_to_key() -> None:
    pool = BlockPool(6)
    first, second, free = *put(pool, A, B), 5
    dead = pool.find(None, A)
    open_block = pool.allocate(1)[0]
    for block, tokens in ((0, A), (free, A), (6, A), (-1, A), (True, A), (first, B), (second, A), (second, C)):
        with pytest.raises(InvalidInputError):
            pool.commit(block, None, tokens)
    for tokens in (bytearray(A), memoryview(A), [0, 1]):
        with pytest.raises(InvalidInputError, match="tokens"):
            pool.commit(open_block, None, tokens)  # type: ignore[arg-type]
    for extra, group in (((("salt", "x"),), 0), ((), 1)):
        with pytest.raises(InvalidInputError):
            pool.commit(first, None, A, extra, group)
    assert pool.commit(first, None, A) is dead
    assert get(pool, A, B) == [first, second]
    assert pool.find(None, C) is None


def test_a_refused_commit_revives_nobody() -> None:
    pool = BlockPool(4)
    table = put(pool, A, B)
    dead = pool.find(pool.find(None, A), B)
    pool.free(table)
    pool.free(pool.allocate(3))
    block = put(pool, D)[0]
    with pytest.raises(InvalidInputError):
        pool.commit(block, dead, C)
    assert pool.find(None, A) is None
    assert get(pool, D) == [block]


def test_nothing_is_left_of_content_that_is_gone() -> None:
    pool = BlockPool(6)
    for contents in ((A, B, C), (A, C), (B,), (A, B, D, C, A)):
        pool.free(put(pool, *contents))
    pool.allocate(pool.num_free)
    assert not pool._contents._buckets
    assert not pool._keys


def test_a_long_chain_dies_and_revives_without_recursion() -> None:
    pool, length = BlockPool(3), 50_000
    node, held = None, []
    for at in range(length):
        block = pool.allocate(1)[0]
        node = pool.commit(block, node, pack((at,)))
        pool.free(held)
        held = [block]
    pool.free(held)
    assert sum(map(len, pool._contents._buckets.values())) == length
    block, spare = pool.allocate(2)
    assert not pool._contents._buckets
    node = pool.commit(block, node, A)
    assert sum(map(len, pool._contents._buckets.values())) == length + 1
    pool.free([block, spare])
    pool.allocate(2)
    assert not pool._contents._buckets
    depth = 0
    while node is not None:
        node, depth = node.parent, depth + 1
    assert depth == length + 1
