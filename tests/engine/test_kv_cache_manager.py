"""KVCacheManager: sizes, hits, admission, windows, forks, one case at a time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from invariants import check_tables

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, KVGroup, Request
from pagedattn.engine.sampling_params import SamplingParams


def manager(num_blocks: int, *groups: KVGroup, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks, enable_caching=caching), groups or (KVGroup(4),))


def request(tokens: Sequence[int], salt: str | None = None) -> Request:
    return Request("r", array("i", tokens), SamplingParams(), arrival=0, max_total_tokens=10_000, cache_salt=salt)


def compute(kv: KVCacheManager, one: Request, num_tokens: int | None = None) -> None:
    """Admit a request where it is new, and compute it up to `num_tokens` (all of it) in one go."""
    if not one.block_ids:
        assert kv.start(one, kv.lookup(one), 1)
    end = len(one.token_ids) if num_tokens is None else num_tokens
    assert kv.allocate_slots(one, end - one.num_computed_tokens)
    one.num_computed_tokens = end
    kv.commit(one)


def hit(kv: KVCacheManager, tokens: Sequence[int], salt: str | None = None) -> int:
    return kv.lookup(request(tokens, salt)).num_tokens


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_table_has_as_many_blocks_as_its_tokens_need(size: int) -> None:
    kv = manager(100, KVGroup(size))
    one = request(range(40))
    for computed in range(1, 41):
        assert kv.allocate_slots(one, computed - one.num_computed_tokens)
        assert len(one.block_ids[0]) == -(-computed // size) and one.num_slots == len(one.block_ids[0]) * size
        one.num_computed_tokens = computed
        kv.commit(one)
        check_tables(kv, [one])
    kv.free(one)
    check_tables(kv, [one])


def test_tables_only_grow_at_their_end() -> None:
    kv = manager(30)
    one = request(range(40))
    before: list[int] = []
    for end in (3, 4, 5, 17, 40):
        compute(kv, one, end)
        assert one.block_ids[0][: len(before)] == before
        before = one.block_ids[0][:]


def test_allocation_is_all_or_nothing_over_groups() -> None:
    kv = manager(8, KVGroup(4), KVGroup(4, 100))
    one = request(range(30))
    assert kv.allocate_slots(one, 12)
    one.num_computed_tokens = 12
    tables = [table[:] for table in one.block_ids]
    assert not kv.allocate_slots(one, 4)
    assert one.block_ids == tables and one.num_slots == 12 and kv.pool.num_free == 1
    check_tables(kv, [one])


def test_lookahead_slots_are_room_and_never_keyed() -> None:
    kv = manager(30)
    one = request(range(8))
    assert kv.allocate_slots(one, 8, num_lookahead_tokens=5)
    assert len(one.block_ids[0]) == 4
    one.num_computed_tokens = 8
    kv.commit(one)
    assert one.num_cached_blocks == [2] and hit(kv, range(20)) == 8
    kv.trim(one)
    assert len(one.block_ids[0]) == 2
    check_tables(kv, [one])


@pytest.mark.parametrize("length", range(1, 14))
def test_hits_are_full_blocks_and_never_the_last_token(length: int) -> None:
    kv = manager(30)
    compute(kv, request(range(13)))
    assert hit(kv, range(length)) == (length - 1) // 4 * 4
    assert hit(kv, [*range(length), 99]) == length // 4 * 4


def test_hit_ends_at_the_first_different_token() -> None:
    kv = manager(30)
    compute(kv, request(range(16)))
    assert [hit(kv, [*range(at), 99, *range(at + 1, 16)]) for at in range(16)] == [at // 4 * 4 for at in range(12)] + [
        12
    ] * 4


def test_salts_share_with_their_equals_only() -> None:
    kv = manager(30)
    compute(kv, request(range(9), "a"))
    assert (hit(kv, range(9)), hit(kv, range(9), "a"), hit(kv, range(9), "b")) == (0, 8, 0)


def test_skipping_reads_and_disabled_caching_hit_nothing() -> None:
    kv = manager(30)
    compute(kv, request(range(9)))
    skipping = request(range(9))
    skipping.skip_prefix_cache_reads = True
    assert kv.lookup(skipping).num_tokens == 0 and hit(kv, range(9)) == 8
    kv = manager(30, caching=False)
    compute(kv, request(range(9)))
    assert hit(kv, range(9)) == 0


def test_admission_counts_hits_that_nobody_holds_as_free_only_once() -> None:
    """A hit on free blocks takes them from the free ones: 4 hit + 1 new do not fit into 4 free blocks."""
    kv = manager(5)
    first = request(range(16))
    compute(kv, first)
    kv.free(first)
    second = request(range(20))
    found = kv.lookup(second)
    assert found.num_tokens == 16 and kv.pool.num_free == 4
    assert not kv.start(second, found, 4)
    assert not second.block_ids and kv.pool.num_free == 4 and hit(kv, range(20)) == 16
    third = request([*range(15), 77])
    assert kv.start(third, kv.lookup(third), 4) and third.num_cached_tokens == 12


def test_admission_leaves_headroom() -> None:
    kv = manager(11)
    assert not kv.start(request(range(20)), kv.lookup(request(range(20))), 20, headroom=6)
    assert kv.start(request(range(20)), kv.lookup(request(range(20))), 20, headroom=5)


def test_windows_release_to_the_null_block_and_stay_findable() -> None:
    kv = manager(40, KVGroup(4, 6))
    one = request(range(24))
    for end in range(1, 25):
        compute(kv, one, end)
        check_tables(kv, [one])
    assert one.block_ids[0][:4] == [0, 0, 0, 0] and kv.pool.num_free == 39 - 2
    found = kv.lookup(request(range(17)))
    assert found.num_tokens == 16 and found.blocks[0][:2] == [0, 0] and all(found.blocks[0][2:])


def test_window_hit_needs_the_last_blocks_only() -> None:
    """With an early block evicted a window group still hits behind it, and falls back where it is needed."""
    kv = manager(7, KVGroup(4, 5))
    one = request(range(24))
    compute(kv, one)
    kv.free(one)
    assert [hit(kv, range(length)) for length in (25, 24, 20)] == [24, 20, 16]
    compute(kv, request(range(50, 54)))
    assert [hit(kv, range(length)) for length in (25, 24, 20)] == [24, 16, 16]


def test_groups_agree_on_one_length() -> None:
    """As blocks are evicted one by one, hits shrink to what both groups still hold, and to nothing in between."""
    kv = manager(40, KVGroup(4), KVGroup(4, 6))
    one, part = request(range(32)), request(range(29))
    compute(kv, one)
    kv.free(one)
    assert kv.start(part, kv.lookup(part), 1) and part.num_cached_tokens == 28
    kv.free(part)
    lengths = []
    while kv.pool.num_free:
        kv.pool.allocate(1)
        lengths.append(hit(kv, range(33)))
    assert sorted(set(lengths)) == [0, 28, 32] and lengths == sorted(lengths, reverse=True)


def test_unequal_block_sizes_agree_on_a_common_multiple() -> None:
    kv = manager(60, KVGroup(4), KVGroup(6))
    compute(kv, request(range(40)))
    assert [hit(kv, range(length)) for length in (12, 13, 24, 25, 40)] == [0, 12, 12, 24, 36]


def test_fork_shares_full_blocks_and_copies_the_open_one() -> None:
    kv = manager(40)
    parent = request(range(11))
    compute(kv, parent)
    child = request(range(11))
    (pair,) = kv.fork(parent, child) or [(0, 0)]
    assert child.num_computed_tokens == 10 and child.block_ids[0][:2] == parent.block_ids[0][:2]
    assert pair == (parent.block_ids[0][2], child.block_ids[0][2]) and pair[0] != pair[1]
    check_tables(kv, [parent, child])
    child.token_ids.extend(range(70, 79))
    compute(kv, child)
    assert hit(kv, [*range(11), *range(70, 80)]) == 20, "a fork keys its blocks below the blocks that it shares"
    kv.free(parent)
    check_tables(kv, [child])


@pytest.mark.parametrize("length", range(2, 14))
def test_fork_after_the_parent_went_on(length: int) -> None:
    """The parent may have generated more: the child still shares what it needs, and keys its blocks rightly."""
    kv = manager(60)
    parent = request(range(length))
    parent.token_ids.extend(range(50, 59))
    compute(kv, parent)
    child = request(range(length))
    assert kv.fork(parent, child) is not None
    check_tables(kv, [parent, child], exact=False)
    child.token_ids.extend(range(70, 85))
    compute(kv, child)
    assert hit(kv, [*range(length), *range(70, 86)]) == (length + 15) // 4 * 4


def test_fork_is_refused_where_the_window_moved_on_or_blocks_are_short() -> None:
    kv = manager(40, KVGroup(4), KVGroup(4, 4))
    parent = request(range(12))
    compute(kv, parent)
    child = request(range(12))
    assert kv.fork(parent, child) is not None
    kv.free(child)
    parent.token_ids.extend(range(12))
    compute(kv, parent)
    late = request(range(12))
    assert kv.fork(parent, late) is None and not late.block_ids
    kv = manager(4)
    parent = request(range(11))
    compute(kv, parent)
    assert kv.fork(parent, request(range(11))) is None
    assert kv.fork(parent, request([1])) is None
    check_tables(kv, [parent])


def test_reset_needs_an_idle_cache() -> None:
    kv = manager(30)
    one = request(range(9))
    compute(kv, one)
    assert not kv.reset_prefix_cache() and hit(kv, range(9)) == 8
    kv.free(one)
    assert hit(kv, range(9)) == 8
    assert kv.reset_prefix_cache() and hit(kv, range(9)) == 0


def test_discarded_content_is_not_found_again() -> None:
    kv = manager(30)
    good = request(range(9))
    compute(kv, good)
    bad = request([*range(8), *range(60, 80)])
    compute(kv, bad)
    assert hit(kv, [*range(8), *range(60, 80)]) == 24
    kv.discard(bad)
    assert hit(kv, [*range(8), *range(60, 80)]) == 8
    check_tables(kv, [good, bad])


def test_half_windowed_cache_holds_more_tokens() -> None:
    """In the same pool, a model whose second half has a window runs sequences that a full one has no room for."""
    full, half = manager(41, KVGroup(4), KVGroup(4)), manager(41, KVGroup(4), KVGroup(4, 8))
    lengths = []
    for kv in (full, half):
        one = request(range(400))
        while kv.allocate_slots(one, 1):
            one.num_computed_tokens += 1
            kv.commit(one)
        lengths.append(one.num_computed_tokens)
    assert lengths == [80, 148]
