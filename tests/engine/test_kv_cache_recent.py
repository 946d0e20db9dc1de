"""KVCacheManager over a second cache, of blocks that are not encoded: its pool, hits, forks and swaps, case by case."""

from __future__ import annotations

import sys

import pytest
from invariants import check_tables
from test_kv_cache_manager import compute, hit, manager, request

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, KVGroup
from pagedattn.errors import InvalidInputError

OPEN = [KVGroup(4), KVGroup(4, recent_blocks=6)]
RECENT = [KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=16, window_blocks=2)]
FIRST = [KVGroup(4, window_blocks=1, first_blocks=2), KVGroup(4, None, 16, 1, 2)]


def test_open_blocks_are_held_until_they_are_full() -> None:
    kv = manager(40, *OPEN)
    one, pool = request(range(30)), kv.recent_pool
    assert pool is not None
    held = []
    for end in (3, 4, 5, 17, 20, 30):
        assert (
            kv.start(one, kv.lookup(one), end)
            if not one.block_ids
            else kv.allocate_slots(one, end - one.num_computed_tokens)
        )
        held.append(pool.num_usable - pool.num_free)
        one.num_computed_tokens = end
        kv.commit(one)
        check_tables(kv, [one])
        assert pool.num_usable - pool.num_free == (end % 4 > 0)
    assert held == [1, 1, 1, 4, 1, 3], "of the open block and of those that the chunk fills"
    kv.free(one)
    assert pool.num_free == pool.num_usable and hit(kv, range(30)) == 28


def test_chunks_are_cut_to_the_room_of_the_open_block_and_of_free_ones() -> None:
    kv = manager(40, *OPEN)  # 5 open blocks
    one, other = request(range(30)), request(range(50, 90))
    compute(kv, one, 3)
    assert [kv.fit_recent(computed, 99) for computed in (0, 3, 4, 6)] == [16, 17, 16, 18]
    assert [kv.fit_recent(3, 99, headroom) for headroom in (1, 3, 4, 5)] == [13, 5, 1, 1]
    assert kv.fit_recent(3, 9) == 9 and manager(40).fit_recent(0, 99) == 99
    assert not kv.start(other, kv.lookup(other), 17) and not other.block_ids
    check_tables(kv, [one])
    assert kv.start(other, kv.lookup(other), 16) and not kv.allocate_slots(one, 2)
    check_tables(kv, [one, other], exact=False)
    assert kv.allocate_slots(one, 1)


def test_a_block_that_its_parent_filled_is_not_forked() -> None:
    kv = manager(40, *OPEN)
    parent = request(range(11))
    compute(kv, parent)
    child = request(range(11))
    assert kv.fork(parent, child) is not None and kv.take_recent()[1] == [
        (parent.block_ids[1][2], child.block_ids[1][2])
    ]
    assert child.block_ids[1][:2] == [0, 0] and not kv.take_recent()[1]
    check_tables(kv, [parent, child], exact=False)
    parent.token_ids.append(99)
    compute(kv, parent)
    late = request(range(11))
    assert kv.fork(parent, late) is None and not late.block_ids
    kv.free(child)
    check_tables(kv, [parent])


def test_groups_of_open_blocks_stand_behind_one_of_layers() -> None:
    for groups in (
        [OPEN[1]],
        OPEN[::-1],
        [KVGroup(8), OPEN[1]],
        [KVGroup(4, 9), OPEN[1]],
        [KVGroup(4), *OPEN],
        [OPEN[0], RECENT[1]],
    ):
        with pytest.raises(InvalidInputError, match=r"groups must be .*recent_blocks"):
            manager(40, *groups)


def test_a_window_keeps_blocks_that_are_full() -> None:
    kv = manager(40, *RECENT)
    one, pool = request(range(30)), kv.recent_pool
    assert pool is not None
    held = []
    for end in (3, 4, 9, 12, 13, 30):
        assert kv.allocate_slots(one, end - one.num_computed_tokens)
        one.num_computed_tokens = end
        kv.commit(one)
        check_tables(kv, [one])
        held.append(pool.num_usable - pool.num_free)
    assert held == [1, 1, 3, 2, 3, 3], "two before that of the next token, and the open one"
    kv.free(one)
    assert pool.num_free == pool.num_usable


def test_a_hit_needs_encoded_blocks_and_those_of_the_window() -> None:
    kv = manager(40, *RECENT)
    one = request(range(30))
    compute(kv, one)
    found = kv.lookup(request(range(40)))
    assert found.num_tokens == 20, "of seven full blocks two are not encoded"
    assert found.blocks[0] == one.block_ids[0][:5] and found.blocks[1][:3] == [0, 0, 0] and all(found.blocks[1][3:])
    assert hit(kv, range(18)) == 16 and hit(kv, range(7)) == 4
    kv.free(one)
    assert kv.recent_pool is not None
    pressed = kv.recent_pool.allocate(kv.recent_pool.num_usable - 4)
    assert hit(kv, range(30)) == 20, "the last content of a request is lost last"
    pressed += kv.recent_pool.allocate(1)
    assert hit(kv, range(30)) == 0
    kv.recent_pool.free(pressed)
    assert kv.reset_prefix_cache() and kv.recent_pool.num_cached == 0 and hit(kv, range(30)) == 0


def test_a_hit_takes_blocks_of_the_window_that_nobody_holds() -> None:
    kv = manager(40, KVGroup(4, window_blocks=2), KVGroup(4, recent_blocks=8, window_blocks=2))
    one = request(range(29))
    for end in (8, 16, 24, 29):
        compute(kv, one, end)
    kv.free(one)
    two = request(range(40))
    found, pool = kv.lookup(two), kv.recent_pool
    assert pool is not None and found.num_tokens == 20 and kv.fit_recent(20, 99) == 28 and kv.fit_entering(20, 99) == 20
    assert not kv.start(two, found, 20 + 1) and not two.block_ids and pool.num_free == pool.num_usable
    assert kv.start(two, found, 20) and pool.num_free == 0 and kv.fit_entering(0, 99) == 0
    check_tables(kv, [two], exact=False)


def test_a_fork_shares_the_window() -> None:
    kv = manager(40, *RECENT)
    parent = request(range(19))
    compute(kv, parent)
    child = request(range(19))
    assert kv.fork(parent, child) == [(parent.block_ids[0][4], child.block_ids[0][4])]
    assert kv.take_recent()[1] == [(parent.block_ids[1][4], child.block_ids[1][4])]
    assert child.block_ids[1][:4] == [0, 0, *parent.block_ids[1][2:4]]
    check_tables(kv, [parent, child], exact=False)
    for one in (parent, child):
        one.token_ids.extend([1, 2, 3, 4])
        compute(kv, one)
        assert one.num_cached_blocks == [3, 5], "the block that was not encoded at the fork is, by both"
    check_tables(kv, [parent, child])


def test_what_a_window_reads_is_found_again_or_the_request_is_computed_anew() -> None:
    for lost in (False, True):
        kv = KVCacheManager(BlockPool(40), RECENT, num_swap_blocks=20)
        one = request(range(19))
        compute(kv, one)
        table, window = one.block_ids[0][:4], one.block_ids[1][2:4]
        pairs = kv.swap_out(one)
        assert pairs is not None and [source for source, _ in pairs] == table and not one.block_ids
        assert one.swapped is not None and one.swapped.num_computed_tokens == 16
        assert kv.recent_pool is not None
        if lost:
            kv.recent_pool.free(kv.recent_pool.allocate(kv.recent_pool.num_usable))
        assert (kv.swap_in(one, 3) is None) == lost and (one.swapped is None) == lost
        if not lost:
            assert one.block_ids[1][:4] == [0, 0, *window]
            check_tables(kv, [one], exact=False)
    kv = KVCacheManager(BlockPool(40, enable_caching=False), RECENT, num_swap_blocks=20)
    compute(kv, one := request(range(19)))
    assert kv.swap_out(one) is None and one.block_ids, "nothing is found without content"


def test_first_blocks_stay_and_are_needed() -> None:
    kv = KVCacheManager(BlockPool(40), FIRST, num_swap_blocks=20)
    one = request(range(30))
    compute(kv, one)
    check_tables(kv, [one])
    table = one.block_ids[1]
    assert [index for index, block in enumerate(table) if block] == [0, 1, 6, 7], "two first ones, a window, and open"
    found = kv.lookup(request(range(40)))
    assert found.num_tokens == 24 and found.blocks[1][:2] == table[:2] and found.blocks[1][2:5] == [0, 0, 0]
    child = request(range(30))
    assert kv.fork(one, child) is not None and child.block_ids[1][:7] == table[:7]
    check_tables(kv, [one, child], exact=False)
    kv.free(child)
    assert kv.swap_out(one) is not None and kv.swap_in(one, 2) is not None
    assert one.block_ids[1][:7] == table[:7]
    check_tables(kv, [one], exact=False)
    kv.trim(one)
    kv.free(one)
    assert kv.recent_pool is not None
    kv.recent_pool.touch(found.blocks[1][5:])
    assert hit(kv, range(40)) == 24
    kv.recent_pool.allocate(kv.recent_pool.num_free)
    assert hit(kv, range(40)) == 0, "the window alone is there"
    assert manager(40, *FIRST).most_requests == 15 // 4


def test_requests_are_as_many_as_have_a_window() -> None:
    assert manager(40).most_requests == sys.maxsize == manager(16, *RECENT).most_requests
    assert manager(40, *OPEN).most_requests == 5 and manager(40, *RECENT).most_requests == 5
    with pytest.raises(InvalidInputError, match="recent_blocks must be at least 4, the null block and those of one"):
        manager(40, RECENT[0], KVGroup(4, recent_blocks=3, window_blocks=2))
    assert manager(3, RECENT[0], KVGroup(4, recent_blocks=3, window_blocks=2)).most_requests == sys.maxsize
