"""Mistakes that small engines made in scheduling and prefix caching, each with a test that would catch it here."""

from __future__ import annotations

import pytest
from fake_runner import LaunchingRunner, expected, fake_llm, greedy
from scheduler_bench import Bench, prompt, update

from pagedattn.engine import RequestStatus


def test_stale_content_is_not_hit_after_its_block_was_handed_out() -> None:
    """Blocks of an ended request that were given to another can no longer be found."""
    bench = Bench(9)
    bench.add(prompt(16), 2)
    bench.finish()
    bench.add(prompt(28, 5), 2)
    bench.finish()
    again = bench.add(prompt(16), 4)
    bench.finish()
    assert again.num_prompt_hits == 0


def test_full_hit_still_computes_the_last_token() -> None:
    """A cached prompt of whole blocks is hit up to its last block only, and gives the same tokens."""
    bench = Bench()
    first = bench.add(prompt(16), 4)
    bench.finish()
    second = bench.add(prompt(16), 4)
    step = bench.step()
    assert second.num_cached_tokens == 12 and step is not None and step.num_tokens == 4
    bench.finish()
    assert second.token_ids == first.token_ids


def test_blocks_are_keyed_only_after_they_are_computed() -> None:
    """Of two equal prompts admitted in one step, the second does not hit what the first has yet to compute."""
    bench = Bench()
    both = [bench.add(prompt(13), 4) for _ in range(2)]
    both[1].skip_prefix_cache_reads = True
    step = bench.scheduler.schedule()
    assert step is not None and [item.start for item in step.scheduled] == [0, 0]
    third = bench.add(prompt(13), 4)
    assert bench.kv.lookup(third).num_tokens == 0
    update(bench.scheduler, step, bench.runner.execute(step))
    assert bench.kv.lookup(third).num_tokens == 12
    bench.finish()
    assert both[0].token_ids == both[1].token_ids == third.token_ids


def test_equal_blocks_computed_twice_serve_and_leave_cleanly() -> None:
    """Duplicates of one content are a waste, never wrong, and any of them can go first."""
    bench = Bench()
    first, second = bench.add(prompt(16), 2), bench.add(prompt(16), 12)
    second.skip_prefix_cache_reads = True
    bench.step()
    tables = first.block_ids[0][:4], second.block_ids[0][:4]
    assert not set(tables[0]) & set(tables[1])
    bench.scheduler.finish(first, RequestStatus.FINISHED_ABORT)
    third = bench.add(prompt(16), 3)
    bench.step()
    assert third.num_prompt_hits == 12
    bench.requests.remove(first)
    bench.finish()


def test_scheduled_tokens_count_from_the_hit() -> None:
    """What a step computes is counted after the prefix was looked up, also after a preemption."""
    bench = Bench(14, seqs=4, budget=40)
    for index in range(4):
        bench.add(prompt(12), 12) if index % 2 else bench.add(prompt(12, index), 12)
    steps = bench.finish()
    assert bench.scheduler.stats.preemptions > 0 and bench.scheduler.stats.cached_tokens > 0
    assert all(item.start + item.num_tokens <= len(item.request.token_ids) for step in steps for item in step.scheduled)


def test_chunks_end_where_the_step_ends() -> None:
    """A chunk samples only if it is the last, and a request's chunks join without gap or overlap."""
    bench = Bench(200, budget=7)
    request = bench.add(prompt(45), 3)
    position = 0
    for step in bench.finish():
        (item,) = step.scheduled
        assert item.start == position and item.samples == (item.start + item.num_tokens >= 45)
        position += item.num_tokens
    assert position == len(request.token_ids) - 1 and len(bench.runner.steps) == 7 + 2


@pytest.mark.parametrize("length", [15, 16, 17])
def test_sampled_token_survives_preemption(length: int) -> None:
    """Around a block boundary, what was generated before a preemption is computed again, not drawn again."""
    bench = Bench(2 * (length + 8) // 4, seqs=2, budget=64)
    old, new = bench.add(prompt(length), 16), bench.add(prompt(length, 1), 16)
    seen: list[int] = []
    while not new.finished:
        bench.step()
        tokens = new.token_ids[new.prompt_len :].tolist()
        assert tokens[: len(seen)] == seen
        seen = tokens
    bench.finish()
    assert new.num_preemptions > 0 and old.num_preemptions == 0 and len(seen) == 16


def test_lone_request_that_outgrows_the_cache_ends_with_length() -> None:
    """Growth beyond the pool ends that request with a reason, and with right tokens up to there."""
    bench = Bench(6)
    request = bench.add(prompt(9), 100)
    bench.finish()
    assert request.status is RequestStatus.FINISHED_LENGTH and request.explanation is not None
    assert "num_kv_blocks" in request.explanation and len(request.token_ids) == 5 * 4 + 1


def test_max_num_seqs_limits_running_not_the_step() -> None:
    """Requests beyond the limit wait without blocks, they do not sit in the cache."""
    bench = Bench(200, seqs=8, budget=64)
    for index in range(64):
        bench.add(prompt(6, index), 5)
    bench.step()
    assert len(bench.scheduler.running) == 8 and len(bench.scheduler.waiting) == 56
    bench.finish()


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_requests_run_than_a_step_has_tokens(overlap: bool) -> None:
    """Also while a step is launched ahead, in which requests that are about to end need none of the budget."""
    runner, running = LaunchingRunner(), list[int]()
    llm = fake_llm(runner, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=4)
    runner.before = lambda step: running.append(llm.stats().num_running)
    prompts = [[index] for index in range(16)]
    outputs = llm.generate(prompts, greedy(3))
    assert [list(output.token_ids) for output in outputs] == [expected(prompt, greedy(3)) for prompt in prompts]
    assert max(running) == 4 == max(step.num_tokens for step in runner.steps)


def test_long_prefill_leaves_decodes_their_tokens() -> None:
    """A prompt of many chunks is mixed with decodes, which advance in every step."""
    bench = Bench(200, budget=8)
    short = [bench.add(prompt(3, index), 30) for index in range(3)]
    bench.step()
    long = bench.add(prompt(60, 50), 4)
    mixed = 0
    while long.num_computed_tokens < 60:
        before = [request.num_generated for request in short]
        step = bench.step()
        assert step is not None and step.num_decodes == 3
        assert [request.num_generated for request in short] == [count + 1 for count in before]
        mixed += any(item.request is long for item in step.scheduled)
    assert mixed >= 12
    bench.finish()


def test_chunks_take_blocks_one_by_one_but_a_prompt_waits_until_it_fits() -> None:
    """Blocks are taken per chunk, yet a prompt whose rest would not fit is not admitted to thrash."""
    bench = Bench(28, budget=8)
    first = bench.add(prompt(60), 20)
    bench.step()
    assert len(first.block_ids[0]) == 2
    bench.add(prompt(60, 1), 20)
    while not first.finished:
        bench.step()
        assert len(bench.scheduler.running) <= 1
    bench.finish()
    assert bench.scheduler.stats.preemptions == 0


def test_tables_hold_exactly_what_is_computed() -> None:
    """After every step a table has ceil(computed / block size) blocks, at block boundaries too."""
    bench = Bench(budget=6)
    request = bench.add(prompt(11), 14)
    lengths = set()
    while not request.finished:
        bench.step()
        if not request.finished:
            assert len(request.block_ids[0]) == -(-request.num_computed_tokens // 4)
            lengths.add(request.num_computed_tokens % 4)
    assert lengths == {0, 1, 2, 3}
