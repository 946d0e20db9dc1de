"""Preemption by swap: every token right, nothing copied that need not be, and recomputation where a swap cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_scheduler
from scheduler_bench import Bench, prompt, update

from pagedattn import FullAttentionSpec, PagedKVCache, SlidingWindowSpec
from pagedattn.engine import KVGroup, Request, RequestStatus, SampledToken
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.worker.block_copier import BlockCopier
from pagedattn.engine.worker.host_batch import BlockMoves
from pagedattn.engine.worker.kv_memory import swap_config
from pagedattn.errors import CapacityError, InvalidInputError

GROUPS = {
    "full": [KVGroup(4)],
    "hybrid": [KVGroup(4), KVGroup(4, 7), KVGroup(4, 7)],
    "unequal": [KVGroup(4), KVGroup(8, 6)],
}


def until_preempted(bench: Bench) -> Request:
    """Run until somebody is swapped out; returns whom."""
    for _ in range(200):
        bench.step()
        if victims := [request for request in bench.scheduler.waiting.values() if request.swapped is not None]:
            return victims[0]
    raise AssertionError("nobody was swapped out")


def tight(**options: Any) -> Bench:
    """Two requests that outgrow the cache together."""
    bench = Bench(11, **{"swap_blocks": 40, "budget": 64, **options})
    for index in range(2):
        bench.add(prompt(15, index), 20)
    return bench


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", GROUPS)
def test_with_enough_host_memory_nothing_is_computed_twice(name: str, caching: bool) -> None:
    groups = GROUPS[name]
    bench = Bench(1 + 18 * len(groups), groups, caching=caching, seqs=12, budget=40, swap_blocks=999)
    for index in range(16):
        bench.add(prompt(5 + index, index), 24)
    bench.finish()
    stats = bench.scheduler.stats
    assert stats.swaps == stats.preemptions > 2 and stats.recomputed_tokens == 0
    assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 15
    needed = sum(len(request.token_ids) - 1 for request in bench.requests)
    assert stats.scheduled_tokens + stats.cached_tokens == needed


def test_a_swapped_request_goes_on_where_it_was() -> None:
    """It runs as a decode in the step that brings it back, with the tokens that it had computed."""
    bench = tight()
    victim = until_preempted(bench)
    assert victim.swapped is not None and not victim.block_ids
    computed, cached = victim.swapped.num_computed_tokens, victim.num_prompt_hits
    while victim.status is RequestStatus.PREEMPTED:
        step = bench.step()
    assert step is not None and step.swap_in and victim.swapped is None
    (item,) = [item for item in step.scheduled if item.request is victim]
    assert (item.start, item.num_tokens) == (computed, 1) and step.num_decodes == len(step.scheduled)
    assert victim.num_prompt_hits == cached
    bench.finish()


def test_what_a_failed_step_was_to_swap_out_is_computed_again() -> None:
    """Its blocks may have been written to before they were copied."""
    bench = tight()
    while not (step := bench.scheduler.schedule()) or not step.swap_out:
        update(bench.scheduler, step, bench.runner.execute(step) if step is not None else [])
    bench.scheduler.rollback(step)
    (victim,) = [request for request in bench.requests if request.status is RequestStatus.PREEMPTED]
    assert victim.swapped is None and bench.scheduler.stats.recomputed_tokens > 0
    assert bench.kv.swap.num_free == bench.kv.swap.num_blocks
    bench.finish()


def test_blocks_that_stay_cached_are_not_copied_back() -> None:
    """Of the victim's blocks only those are copied back that were handed to others, or that carry no key."""
    bench = tight()
    old, victim = bench.requests[0], until_preempted(bench)
    assert victim.swapped is not None
    kept = sum(bench.kv.pool.block_of(node) is not None for node in victim.swapped.contents[0])
    bench.scheduler.finish(old, RequestStatus.FINISHED_ABORT)
    bench.requests.remove(old)
    step = bench.step()
    assert step is not None and kept > 0
    assert len(step.swap_in) == -(-step.scheduled[0].start // 4) - kept
    bench.finish()


def test_what_was_copied_back_can_be_hit_again() -> None:
    """Blocks that others took meanwhile lost their keys; those that replace them get new ones once they are filled."""
    bench = tight()
    victim = until_preempted(bench)
    while victim.status is RequestStatus.PREEMPTED:
        step = bench.step()
    assert step is not None and len(step.swap_in) > 1
    twin = Request("twin", victim.token_ids[:], victim.sampling, arrival=99, max_total_tokens=99)
    assert bench.kv.lookup(twin).num_tokens == victim.num_computed_tokens // 4 * 4
    bench.finish()


def test_blocks_that_others_hold_are_not_copied_out() -> None:
    bench = Bench(15, swap_blocks=40, budget=64, seqs=3)
    bench.add(prompt(17), 1)
    bench.finish()
    old, new = bench.add(prompt(17), 24), bench.add(prompt(17), 24)
    victim = until_preempted(bench)
    assert victim is new and victim.swapped is not None and old.num_prompt_hits == new.num_prompt_hits == 16
    assert min(victim.swapped.places[0]) == 4 and len(victim.swapped.contents[0]) > 4
    bench.finish()


def test_a_shared_block_that_was_lost_costs_a_recomputation() -> None:
    """Not copied, because another request held it, and evicted after that one ended."""
    bench = Bench(15, swap_blocks=40, budget=64, seqs=3)
    bench.add(prompt(17), 1)
    bench.finish()
    old, victim = bench.add(prompt(17), 24), bench.add(prompt(17), 24)
    assert until_preempted(bench) is victim and victim.swapped is not None
    computed = victim.swapped.num_computed_tokens
    bench.scheduler.finish(old, RequestStatus.FINISHED_ABORT)
    bench.requests.remove(old)
    bench.kv.pool.free(bench.kv.pool.allocate(bench.kv.pool.num_free))
    step = bench.step()
    assert step is not None and not step.swap_in and step.scheduled[0].start == 0
    assert bench.scheduler.stats.recomputed_tokens == computed
    bench.finish()


def test_without_room_on_the_host_requests_are_computed_again() -> None:
    bench = tight(swap_blocks=3)
    bench.finish()
    stats = bench.scheduler.stats
    assert stats.preemptions > 0 and stats.swaps == 0 and stats.recomputed_tokens > 0


@pytest.mark.parametrize(("cost", "swaps"), [(0.0, True), (3.0, True), (4.1, False)])
def test_the_cheaper_way_is_taken(cost: float, swaps: bool) -> None:
    """Blocks of 4 tokens: one that costs as much as 3 tokens is worth moving, one that costs more than 4 is not."""
    bench = tight(swap_cost=cost)
    bench.finish()
    stats = bench.scheduler.stats
    assert stats.preemptions > 0 and (stats.swaps == stats.preemptions) == swaps and (stats.swaps > 0) == swaps


def test_a_failed_step_that_swapped_out_leaves_nothing_to_trust() -> None:
    """Whether the blocks were copied before the step failed is not known, so they are computed again."""
    bench, failed = tight(), 0
    while not all(request.finished for request in bench.requests):
        step = bench.scheduler.schedule()
        assert step is not None
        if step.swap_out:
            victims = [request for request in bench.scheduler.waiting.values() if request.swapped is not None]
            bench.scheduler.rollback(step)
            assert victims and all(request.swapped is None for request in victims)
            failed += 1
        else:
            update(bench.scheduler, step, bench.runner.execute(step))
        check_scheduler(bench.scheduler)
    assert failed > 0 and bench.scheduler.stats.swaps == 0 and bench.scheduler.stats.recomputed_tokens > 0
    bench.finish()


@pytest.mark.parametrize("executed", [False, True])
def test_a_failed_step_that_swapped_in_can_be_tried_again(executed: bool) -> None:
    bench = tight()
    victim = until_preempted(bench)
    failed = 0
    while not all(request.finished for request in bench.requests):
        step = bench.scheduler.schedule()
        assert step is not None
        results = bench.runner.execute(step) if executed or not step.swap_in or failed > 3 else []
        if step.swap_in and failed <= 3:
            bench.scheduler.rollback(step)
            assert victim.swapped is not None and victim.status is RequestStatus.PREEMPTED
            failed += 1
        else:
            update(bench.scheduler, step, results)
        check_scheduler(bench.scheduler)
    assert failed > 3 and bench.scheduler.stats.recomputed_tokens == 0
    bench.finish()


def test_the_cache_is_not_reset_under_a_request_that_is_only_swapped() -> None:
    """All blocks of the device are free then, but it is by content that a swapped request finds its own again."""
    bench = tight()
    victim = until_preempted(bench)
    bench.scheduler.finish(bench.requests[0], RequestStatus.FINISHED_ABORT)
    assert bench.kv.pool.num_free == bench.kv.pool.num_usable and victim.swapped is not None
    assert not bench.kv.reset_prefix_cache()
    bench.finish()
    assert bench.kv.reset_prefix_cache()


@pytest.mark.parametrize("when", ["waiting", "in flight"])
def test_an_abort_gives_the_host_blocks_back(when: str) -> None:
    bench = tight()
    victim = until_preempted(bench)
    assert bench.kv.swap.num_free < bench.kv.swap.num_blocks and not bench.kv.reset_prefix_cache()
    if when == "in flight":
        while not (step := bench.scheduler.schedule()) or not step.swap_in:
            assert step is not None
            update(bench.scheduler, step, bench.runner.execute(step))
        results = bench.runner.execute(step)
    bench.scheduler.finish(victim, RequestStatus.FINISHED_ABORT)
    if when == "in flight":
        update(bench.scheduler, step, results)
    check_scheduler(bench.scheduler)
    assert bench.kv.swap.num_free == bench.kv.swap.num_blocks
    bench.finish()


def test_a_request_that_fails_as_it_comes_back_leaves_nothing_in_the_cache() -> None:
    bench = tight()
    victim = until_preempted(bench)
    tokens = victim.token_ids[:]
    while not victim.finished:
        step = bench.scheduler.schedule()
        assert step is not None
        bad = [item.request is victim for item in step.scheduled]
        results = bench.runner.execute(step)
        sampled = [SampledToken(-1, error="NaN") if b else token for b, token in zip(bad, results, strict=True)]
        update(bench.scheduler, step, sampled)
        check_scheduler(bench.scheduler)
    assert len(tokens) > 16 and bench.scheduler.stats.swapped_in_blocks > 0
    bench.requests.remove(victim)
    again = bench.add(tokens, 2)
    bench.finish()
    assert again.num_prompt_hits == 0


def test_blocks_of_a_request_that_failed_are_not_taken_for_ones_own() -> None:
    """Two requests begin alike; the first one's values are not to be trusted, and its blocks are found by content."""
    bench = Bench(20, swap_blocks=40, budget=64)
    kv, one, other = bench.kv, *(bench.add(prompt(15, 0), 20) for _ in range(2))
    for request in (one, other):
        hit = kv.lookup(request)
        assert hit.num_tokens == 0 and kv.start(request, hit, 15)
        request.num_computed_tokens = 15
        kv.commit(request)
        if request is one:
            kv.discard(one)
    assert kv.swap_out(other) is not None
    copied = kv.swap_in(other, 1)
    assert copied is not None and len(copied) == 4
    assert [block for _, block in copied] == other.block_ids[0][:4]


def test_restart_forgets_what_was_swapped() -> None:
    bench = tight()
    victim = until_preempted(bench)
    assert victim.swapped is not None
    other = Bench(11, swap_blocks=40)
    bench.kv = other.kv
    bench.scheduler.restart(other.kv, [request for request in bench.requests if not request.finished])
    bench.runner.ref_count = other.kv.pool.ref_count
    assert victim.swapped is None
    bench.finish()


def test_blocks_come_back_byte_for_byte() -> None:
    """Random moves of a cache of two kinds of layers against a list of what every block must hold."""
    full = FullAttentionSpec(num_kv_heads=2, head_dim=8, block_size=4)
    window = SlidingWindowSpec(num_kv_heads=2, head_dim=8, block_size=4, sliding_window=6)
    cache = PagedKVCache.from_specs([full, window, full, window], 12, device="cpu")
    generator = torch.Generator().manual_seed(1)
    cache.slabs.copy_(torch.randint(0, 256, cache.slabs.shape, generator=generator, dtype=torch.uint8))
    mover = BlockCopier(cache, 9)
    device, host = [cache.slabs[:, block].clone() for block in range(12)], {}
    for _ in range(50):
        blocks, places = (
            torch.randperm(12, generator=generator).tolist(),
            torch.randperm(9, generator=generator).tolist(),
        )
        out = list(zip(blocks[:3], places, strict=False))
        back = [(place, block) for place, block in zip(places, blocks[4:7], strict=False)]
        pairs = (np.array(one, dtype=np.int32).reshape(-1, 2) for one in (out, [], back, [(back[0][1], blocks[8])]))
        mover.move(BlockMoves(*pairs))
        host |= {place: device[block] for block, place in out}
        for place, block in back:
            device[block] = host[place]
        device[blocks[8]] = device[back[0][1]]
        assert torch.equal(cache.slabs, torch.stack(device, 1))


def test_how_much_room_there_is_and_what_it_costs() -> None:
    def room(device: str, size: int = 16, **options: Any) -> tuple[int, float]:
        config, groups = EngineConfig(model="m", **options), [KVGroup(size)]
        found = swap_config(config, torch.device(device), 1 << 20, groups, 600_000_000)
        return found.num_blocks, found.tokens_per_block

    assert room("cuda")[0] == 4096 and room("cpu")[0] == 0
    assert room("cpu", preemption="swap")[0] == 4096 and room("cuda", preemption="recompute")[0] == 0
    assert room("cuda", swap_space=5 << 20)[0] == 5
    # 2 MiB over the bus at 50 GB/s take as long as 14 tokens of 1.2 GFLOP.
    assert 13 < room("cuda")[1] < 15
    assert room("cuda", 14)[0] == 4096 and room("cuda", 13)[0] == 0 and room("cuda", 13, preemption="swap")[0] == 4096
    with pytest.raises(CapacityError, match=r"swap_space=7 holds no block: one has 1048576 bytes"):
        room("cuda", preemption="swap", swap_space=7)
    with pytest.raises(InvalidInputError, match="preemption"):
        EngineConfig(model="m", preemption="swop")


def test_a_fork_waits_for_its_parent_to_be_swapped_in() -> None:
    """Else it would be keyed below contents that the parent's table does not carry again yet."""
    bench, twins = Bench(9, seqs=2, swap_blocks=20), [7, 7, 7, 7, 5, 6, 7, 8]
    old, parent, child = bench.add(prompt(4), 28), bench.add(twins, 12), bench.add(twins, 12)
    child.fork_of = parent
    while not old.finished:
        bench.step()
    while parent.swapped is not None:
        step = bench.step()
    assert step is not None and step.swap_in and child.status is RequestStatus.WAITING
    bench.finish()
    bench.add([5, 6, 7, 8, 1, 2])
    bench.finish()
    assert bench.scheduler.stats.swapped_in_blocks > 0 and child.num_prompt_hits == 7
