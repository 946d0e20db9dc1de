"""Evicted blocks of the prefix cache in host memory: found again, loaded once, given up for requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner, LaunchingRunner, expected, fake_llm, greedy
from invariants import check_idle, check_scheduler
from tiny_models import hf_model, save

from pagedattn import BlockPool
from pagedattn.engine import LLM, KVGroup, SchedulerOutput
from pagedattn.errors import CapacityError

FIRST, SECOND, THIRD = ([first, *range(5, 26)] for first in (1, 2, 3))  # 22 tokens each, five full blocks
FULL = (KVGroup(4),)


def llm_of(
    num_blocks: int = 8, host: int = 20, kind: type[FakeRunner] = FakeRunner, groups: Any = FULL, **options: Any
) -> tuple[FakeRunner, LLM]:
    runner = kind(num_blocks, groups, swap_blocks=host, keeps_prefixes=True)
    return runner, fake_llm(runner, **options)


def hits(llm: LLM, prompt: list[int]) -> int:
    """Tokens of a prompt that were cached; its tokens are right."""
    (output,) = llm.generate([prompt], greedy(3))
    assert list(output.token_ids) == expected(prompt, greedy(3))
    check_scheduler(llm._scheduler)
    return output.cached_tokens


@pytest.mark.parametrize("kind", [FakeRunner, LaunchingRunner])
def test_a_prefix_outlives_the_pool(kind: type[FakeRunner]) -> None:
    _, llm = llm_of(kind=kind, overlap=kind is LaunchingRunner)
    assert [hits(llm, prompt) for prompt in (FIRST, SECOND, THIRD)] == [0, 0, 0]
    assert llm.stats().num_prefix_copies >= 5
    assert [hits(llm, prompt) for prompt in (FIRST, SECOND, THIRD, FIRST)] == [20] * 4
    copies, loaded = llm._scheduler.kv.copies, llm.stats().counters.swapped_in_blocks
    # What was loaded is keyed, and is found on the device from then on.
    assert hits(llm, FIRST) == 20 and llm.stats().counters.swapped_in_blocks == loaded >= 4 * 4
    assert len(copies) == len({*copies._copies.values()})
    check_idle(llm)


def test_without_room_for_them_nothing_is_kept() -> None:
    llm = fake_llm(FakeRunner(8, swap_blocks=20))
    assert [hits(llm, prompt) for prompt in (FIRST, SECOND, THIRD, FIRST)] == [0] * 4
    assert llm.stats().num_prefix_copies == llm.stats().counters.swapped_out_blocks == 0


def test_the_least_recently_used_copies_make_room() -> None:
    _, llm = llm_of(host=6)
    for prompt in (FIRST, SECOND, THIRD):
        hits(llm, prompt)
    assert llm.stats().num_prefix_copies == 6 and llm.stats().num_free_swap_blocks == 0
    # SECOND was evicted last; of FIRST one block at most is left, not its first.
    assert hits(llm, SECOND) > 0 and hits(llm, FIRST) == 0


def test_equal_prompts_load_their_beginning_once() -> None:
    runner, llm = llm_of(18, 40)
    for prompt in (FIRST, SECOND, THIRD, [4, *FIRST[1:]]):
        hits(llm, prompt)
    runner.steps.clear()
    outputs = llm.generate([[*FIRST, 7, 8], [*FIRST, 9, 9]], greedy(3))
    assert [output.cached_tokens for output in outputs] == [20, 20]
    loads = [host for step in runner.steps for host, _ in step.swap_in]
    assert loads and len({*loads}) == len(loads)


def test_a_window_needs_its_last_blocks_only() -> None:
    runner, llm = llm_of(14, 40, groups=(KVGroup(4), KVGroup(4, 6)))
    for prompt in (FIRST, SECOND, THIRD):
        hits(llm, prompt)
    runner.steps.clear()
    assert hits(llm, FIRST) == 20
    assert 0 < sum(len(step.swap_in) for step in runner.steps) < 10


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_of_a_failed_step_is_dropped(when: str) -> None:
    runner, llm = llm_of()
    hits(llm, FIRST)
    failures = [ZeroDivisionError("a defect")]

    def fail(step: SchedulerOutput) -> None:
        if step.swap_out and failures:
            raise failures.pop()

    setattr(runner, when, fail)
    name = llm.add_request(SECOND, greedy(3))
    with pytest.raises(ZeroDivisionError):
        while True:
            llm.step()
    assert llm.stats().num_prefix_copies == 0
    while llm.has_unfinished:
        for output in llm.step():
            assert output.request_id == name and list(output.token_ids) == expected(SECOND, greedy(3))
    assert hits(llm, FIRST) <= 4 and not failures  # its first block was not evicted
    check_idle(llm)


def test_preempted_requests_take_the_room() -> None:
    _, llm = llm_of(12, 7, preemption="swap", max_num_seqs=4)
    for prompt in (FIRST, SECOND, THIRD):
        hits(llm, prompt)
    assert llm.stats().num_free_swap_blocks == 0
    prompts = [[first, 9, 9] for first in (40, 41, 42)]
    outputs = llm.generate(prompts, greedy(20))
    assert [list(output.token_ids) for output in outputs] == [expected(prompt, greedy(20)) for prompt in prompts]
    assert llm.stats().counters.swaps > 0
    check_idle(llm)


def test_the_prefix_cache_is_reset_with_its_copies() -> None:
    _, llm = llm_of()
    for prompt in (FIRST, SECOND, THIRD):
        hits(llm, prompt)
    assert llm.reset_prefix_cache()
    assert llm.stats().num_prefix_copies == 0 and llm.stats().num_free_swap_blocks == llm.stats().num_swap_blocks
    assert hits(llm, THIRD) == 0


def test_a_pool_tells_what_it_evicts_and_keeps_what_is_retained() -> None:
    pool, evicted = BlockPool(4), []
    pool.on_evict = lambda block, node, group: evicted.append((block, node, group))
    blocks = pool.allocate(2)
    first = pool.commit(blocks[0], None, b"1234")
    second = pool.commit(blocks[1], first, b"5678", group=0)
    pool.retain(second)
    pool.free(blocks)
    assert pool.allocate(3) and evicted == [(blocks[1], second, 0), (blocks[0], first, 0)]
    assert pool.find(None, b"1234") is first and pool.find(first, b"5678") is second
    assert pool.block_of(first) is pool.block_of(second) is None
    pool.release(second)
    assert not first.alive and not second.alive and pool.find(None, b"1234") is None


@pytest.mark.parametrize("model", ["qwen3", "qwen2-mostly-window"])
def test_tokens_are_the_same(model: str, tmp_path: Path) -> None:
    """The real runner: three conversations take turns over a cache for little more than one."""
    folder = save(hf_model(model, torch.float32), tmp_path)
    generator = torch.Generator().manual_seed(1)
    turns = [torch.randint(3, 500, (40 + turn,), generator=generator).tolist() for turn in range(3)]
    prompts = turns + [[*turn, 7, 7] for turn in turns] + [[*turn, 7, 7, 8] for turn in turns]
    found = []
    for space in (0, 1 << 22):
        blocks = 24 if model == "qwen3" else 70
        llm = LLM(folder, device="cpu", block_size=4, num_kv_blocks=blocks, prefix_space=space, max_num_seqs=1)
        outputs = [llm.generate([prompt], greedy(4))[0] for prompt in prompts]
        found.append([list(output.token_ids) for output in outputs])
        cached = [output.cached_tokens for output in outputs]
        assert (min(cached[3:]) >= 40) if space else not any(cached), cached
    assert found[0] == found[1]


def test_room_for_not_even_one_block_is_refused(tmp_path: Path) -> None:
    folder = save(hf_model("qwen3", torch.float32), tmp_path)
    with pytest.raises(CapacityError, match=r"prefix_space=7 holds no block: one has \d+ bytes; raise prefix_space"):
        LLM(folder, device="cpu", prefix_space=7)
