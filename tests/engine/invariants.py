"""What must hold between steps, whatever happened before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagedattn import BlockPool
from pagedattn.engine import KVCacheManager, Request, RequestStatus
from pagedattn.engine.api.llm import LLM
from pagedattn.engine.scheduler.scheduler import Scheduler


def check_tables(
    kv: KVCacheManager, requests: Iterable[Request], *, exact: bool = True, held: Iterable[int] = ()
) -> None:
    """References, sizes and null blocks of the tables of all requests that may hold blocks; `held` are held besides."""
    uses: dict[BlockPool, Counter[int]] = {kv.pool: Counter(held)}
    if kv.recent_pool is not None:
        uses[kv.recent_pool] = Counter()
    for request in requests:
        computed = request.num_computed_tokens
        assert len(request.block_ids) in (0, len(kv.block_sizes))
        assert 0 <= request.num_cached_tokens <= computed <= len(request.token_ids)
        assert request.num_cached_tokens < len(request.token_ids)
        for group, table in enumerate(request.block_ids):
            size, window, recent = kv.block_sizes[group], kv.windows[group], kv.groups[group].recent_blocks
            pool = kv.pool if recent is None else kv.recent_pool
            assert pool is not None
            need = -(-computed // size)
            assert len(table) == need if exact else len(table) >= need
            first = 0 if window is None else max(0, computed - window + 1) // size
            kept = 0 if recent is None else min(kv.groups[group].first_blocks, first)
            live = table[:kept] + table[first:]
            assert not any(table[kept:first]), "a block outlived its window"
            assert all(live), "a live position has no block"
            assert len(set(live)) == len(live)
            assert computed % size == 0 or pool.ref_count(table[computed // size]) == 1, "an open block is shared"
            most = 1 + kv.groups[group].window_blocks
            assert recent is None or not exact or len(table) - first <= most, "blocks that are full are kept"
            uses[pool].update(live)
    for pool, counts in uses.items():
        for block, count in counts.items():
            assert pool.ref_count(block) == count, f"block {block}: {pool.ref_count(block)} holders, {count} uses"
        rest = [block for block in range(1, pool.num_blocks) if block not in counts]
        assert pool.num_evictable(rest) == len(rest), "a block is held that no table has"
        assert pool.num_free == pool.num_usable - len(counts)
        assert pool.ref_count(pool.null_block) == 1


def check_scheduler(scheduler: Scheduler) -> None:
    """Queues are ordered, disjoint and within limits; only running requests hold blocks."""
    running, waiting = scheduler.running, list(scheduler.waiting.values())
    for queue in (running, waiting):
        arrivals = [request.arrival for request in queue]
        assert arrivals == sorted(arrivals)
    assert len(running) <= scheduler.max_num_seqs
    assert len({id(request) for request in running + waiting}) == len(running) + len(waiting)
    assert all(request.status is RequestStatus.RUNNING for request in running)
    assert all(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in waiting)
    assert all(not request.block_ids and not request.num_computed_tokens for request in waiting)
    # Who is swapped in by a launched step keeps its place in host memory until that counts.
    entering = [request for request, _ in scheduler._admitted] if scheduler._in_flight is not None else []
    swapped = [request for request in running + waiting if request.swapped is not None]
    assert all(request.status is RequestStatus.PREEMPTED or request in entering for request in swapped)
    places = [request.swapped.places for request in swapped if request.swapped is not None]
    assert len(places) == scheduler.kv.swap.num_requests
    host = [block for groups in places for group in groups for block in group.values()]
    copies = scheduler.kv.copies
    host += copies._copies.values()
    assert len(set(host)) == len(host) == scheduler.kv.swap.num_blocks - scheduler.kv.swap.num_free
    assert all(node.alive for node, _ in copies._copies)
    left = copies._held, copies._stored, copies._loads
    assert scheduler._in_flight is not None or not any(left)
    # A launched step that nobody has read holds blocks for tokens that do not count as computed yet.
    check_tables(scheduler.kv, running, exact=scheduler._in_flight is None)


def check_idle(llm: LLM) -> None:
    """Nothing is left of any request: every block is free, every queue and register empty."""
    check_scheduler(llm._scheduler)
    assert not llm.has_unfinished and not llm._owners and not llm._scheduler.running and not llm._scheduler.waiting
    for pool in filter(None, (llm._scheduler.kv.pool, llm._scheduler.kv.recent_pool)):
        assert pool.num_free == pool.num_usable
    assert llm._scheduler.kv.swap.num_free + len(llm._scheduler.kv.copies) == llm._scheduler.kv.swap.num_blocks


def run_out(llm: LLM, tokens: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until nothing is left; returns (and puts into `tokens`) what each request generated."""
    tokens = {} if tokens is None else tokens
    while True:
        tokens |= {output.request_id: list(output.token_ids) for output in llm.step()}
        check_scheduler(llm._scheduler)
        if not llm.has_unfinished:
            return tokens
