"""BlockPool: the free list, reference counts, forks and reset, one behaviour at a time."""

from __future__ import annotations

import time

import pytest
from block_pool_model import get, pack, put

from pagedattn.cache.block_pool import BlockPool
from pagedattn.errors import CapacityError, InvalidInputError

A, B, C, D = (pack((i, i + 1)) for i in range(4))


def test_counts_of_a_new_pool() -> None:
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_usable, pool.num_free, pool.num_cached) == (5, 4, 4, 0)
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert [pool.ref_count(block) for block in range(5)] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_blocks", [1, 0, -3, True, 4.0])
def test_a_pool_needs_two_blocks(num_blocks: int) -> None:
    with pytest.raises(InvalidInputError, match="num_blocks"):
        BlockPool(num_blocks)


def test_a_table_is_evicted_tail_first_and_tables_in_the_order_of_their_release() -> None:
    pool = BlockPool(7)
    old, new = put(pool, A, B, C), put(pool, D, C, B)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(6) == [*reversed(old), *reversed(new)]


def test_a_hit_makes_a_block_most_recently_used() -> None:
    pool = BlockPool(4)
    blocks = [put(pool, tokens)[0] for tokens in (A, B, C)]
    for block in blocks:
        pool.free([block])
    pool.touch([blocks[0]])
    assert (pool.num_free, pool.num_cached, pool.ref_count(blocks[0])) == (2, 2, 1)
    pool.free([blocks[0]])
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_blank_blocks_are_used_before_content_is_evicted() -> None:
    pool = BlockPool(5)
    kept, blank = put(pool, A, B), pool.allocate(2)
    pool.free(kept)
    pool.free(blank)
    assert pool.allocate(2) == blank
    assert pool.num_cached == 2
    assert get(pool, A, B) == kept


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    table = put(pool, A, B)
    pool.free(table)
    with pytest.raises(CapacityError, match=r"needs 4 blocks, have 3 free of 3"):
        pool.allocate(4)
    assert (pool.num_free, pool.num_cached) == (3, 2)
    assert get(pool, A, B) == table


@pytest.mark.parametrize("n", [-1, 1.0, True, "1"])
def test_allocate_wants_a_count(n: int) -> None:
    with pytest.raises(InvalidInputError, match="n must be"):
        BlockPool(4).allocate(n)


def test_the_null_block_is_never_handed_out_nor_counted() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert pool.null_block not in table
    pool.touch([0, table[0], 0])
    copy, pairs = pool.fork([0, table[1]], False)
    pool.free([0, *table, 0])
    pool.free([table[0], *copy])
    assert (copy, pairs) == ([0, table[1]], [])
    assert (pool.ref_count(0), pool.num_free) == (1, 3)
    with pytest.raises(InvalidInputError):
        pool.commit(0, None, A)


def test_a_double_or_unknown_free_changes_nothing() -> None:
    pool = BlockPool(6)
    one, two, three, four = pool.allocate(4)
    pool.free([four])
    pool.touch([two])
    for bad in ([one, four], [one, one], [two, two, two], [one, 6], [one, -1], [one, True], [one, 2.0], [5]):
        with pytest.raises(InvalidInputError):
            pool.free(bad)
        assert [pool.ref_count(block) for block in (one, two, three, four)] == [1, 2, 1, 0]
    pool.free([two, one, two])
    assert pool.num_free == 4
    assert pool.allocate(4)[:2] == [two, one]


def test_only_held_blocks_and_content_can_be_touched() -> None:
    pool = BlockPool(4)
    held, blank = pool.allocate(2)
    pool.free([blank])
    for bad in ([held, blank], [held, 4], [held, -1]):
        with pytest.raises(InvalidInputError):
            pool.touch(bad)
    assert pool.ref_count(held) == 1
    pool.share([held])
    assert pool.ref_count(held) == 2
    for unknown in (4, -1):
        with pytest.raises(InvalidInputError):
            pool.ref_count(unknown)


def test_fork_shares_full_blocks_and_copies_the_open_one() -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)
    copy, pairs = pool.fork(table, True)
    assert copy[:2] == table[:2]
    assert copy[2] not in table
    assert pairs == [(table[2], copy[2])]
    assert [pool.ref_count(block) for block in (*table, copy[2])] == [2, 2, 1, 1]
    whole, none = pool.fork(table, False)
    assert (whole, none) == (table, [])
    assert [pool.ref_count(block) for block in table] == [3, 3, 2]


def test_fork_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    with pytest.raises(CapacityError):
        pool.fork(table, True)
    assert [pool.ref_count(block) for block in table] == [1, 1, 1]
    pool.free([table[2]])
    for bad, has_open_block in ((table, False), ([], True), ([table[0], 0], True), ([table[0], 9], False)):
        with pytest.raises(InvalidInputError):
            pool.fork(bad, has_open_block)
    assert ([pool.ref_count(block) for block in table], pool.num_free) == ([1, 1, 0], 1)


def test_reset_waits_for_the_last_holder_and_forgets_everything() -> None:
    pool = BlockPool(4)
    table = put(pool, A, B)
    node = pool.find(None, A)
    assert pool.reset() is False
    pool.free(table[1:])
    assert pool.reset() is False
    assert get(pool, A, B) == table
    pool.free(table[:1])
    assert pool.reset() is True
    assert (pool.num_free, pool.num_cached, pool.find(None, A)) == (3, 0, None)
    assert pool.allocate(3) == BlockPool(4).allocate(3)
    assert node is not None
    assert pool.block_of(node) is None


def test_without_caching_nothing_is_keyed() -> None:
    pool = BlockPool(4, enable_caching=False)
    table = put(pool, A, B)
    assert pool.commit(table[0], None, B) is not pool.commit(table[0], None, B)
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.find(None, A)) == (3, 0, None)
    with pytest.raises(InvalidInputError):
        pool.commit(table[0], None, A)


def test_pools_of_two_caches_share_contents() -> None:
    pool = BlockPool(8)
    other = BlockPool(4, contents_of=pool)
    [mine], [theirs] = pool.allocate(1), other.allocate(1)
    node = pool.commit(mine, None, b"abcd")
    assert other.commit(theirs, None, b"abcd", group=1) is node and other.find(None, b"abcd") is node
    assert (pool.block_of(node), other.block_of(node, 1)) == (mine, theirs)
    pool.free([mine])
    assert pool.reset() and pool.block_of(node) is None and pool.find(None, b"abcd") is node
    other.free([theirs])
    other.free(other.allocate(3))
    assert other.find(None, b"abcd") is None and not node.alive


def test_the_cost_of_a_block_does_not_grow_with_the_pool() -> None:
    """A list where a linked list belongs would take minutes here; the work itself takes about a second."""
    pool = BlockPool(100_001)
    start = time.perf_counter()
    for _ in range(200_000):
        pool.free(pool.allocate(1))
    table = put(pool, *(pack((i,)) for i in range(100_000)))
    pool.free(table)
    for block in table[:50_000]:
        pool.touch([block])
        pool.free([block])
    assert pool.allocate(100_000) == [*table[:49_999:-1], *table[:50_000]]
    assert time.perf_counter() - start < 20


def test_duplicates_cost_no_more_than_other_blocks() -> None:
    pool = BlockPool(50_001)
    start = time.perf_counter()
    table = [put(pool, A)[0] for _ in range(50_000)]
    node = pool.find(None, A)
    assert node is not None
    pool.free(table[::-1])
    for left in range(50_000, 0, -1):
        assert pool.block_of(node) is not None
        assert pool.num_cached == left
        pool.allocate(1)
    assert pool.block_of(node) is None
    assert time.perf_counter() - start < 20
