"""Models of full and sliding-window layers: windows give their blocks back, and everything counts by group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scheduler_bench import Bench, prompt
from tiny_models import hf_model, save

from pagedattn.engine import LLM, KVGroup, SamplingParams
from pagedattn.engine.worker.device_batch import BatchSender

FULL, WINDOW = KVGroup(4), KVGroup(4, 16)
GEMMA2 = [FULL, WINDOW]
GEMMA3 = [FULL, *[WINDOW] * 5]
# The most blocks of 4 that a window of 16 holds while one token at a time is computed.
HELD = 5


@pytest.mark.parametrize("groups", [GEMMA2, GEMMA3], ids=["gemma-2", "gemma-3"])
def test_a_long_decode_holds_its_windows_and_no_more(groups: list[KVGroup]) -> None:
    windows = len(groups) - 1
    bench = Bench(1 + 51 + windows * HELD, groups)
    request = bench.add(prompt(4), 200)
    most = 0
    while not request.finished:
        bench.step()
        held = [sum(block > 0 for block in table) for table in request.block_ids]
        most = max([most, *held[1:]])
        assert not held or held[0] == len(request.block_ids[0])
    assert most == HELD and request.explanation is None and request.num_generated == 200
    bench.finish()


def test_a_hit_takes_only_what_its_windows_read() -> None:
    bench = Bench(200, GEMMA3, budget=256)
    bench.add(prompt(80), 1)
    bench.finish()
    free = bench.kv.pool.num_free
    request = bench.add([*prompt(80), 1], 2)
    bench.step()
    assert request.num_prompt_hits == 80
    # 80 tokens and one more: 21 blocks of the full group; of each window the 15 tokens before and the one itself.
    assert free - bench.kv.pool.num_free == 21 + 5 * (4 + 1)
    assert all(table[:16] == [0] * 16 and all(table[16:]) for table in request.block_ids[1:])
    bench.finish()


@pytest.mark.parametrize("evicted", ["full", "window"])
def test_what_one_group_has_lost_is_hit_by_none(evicted: str) -> None:
    """A hit ends where every group can serve it, whichever group's blocks were handed out to others."""
    bench = Bench(200, GEMMA2, budget=256)
    first = bench.add(prompt(80), 4)
    bench.step()
    tables = [table[:20] for table in first.block_ids]
    bench.finish()
    pool, group = bench.kv.pool, evicted == "window"
    lost = tables[group][17]
    taken = pool.allocate(1)
    while lost not in taken:
        taken += pool.allocate(1)
    pool.free(taken)
    second = bench.add([*prompt(80), 1], 4)
    bench.finish()
    assert second.num_prompt_hits is not None and second.num_prompt_hits < 80


def test_more_requests_run_at_a_time_than_without_windows() -> None:
    def at_a_time(groups: list[KVGroup]) -> int:
        bench, most = Bench(401, groups, budget=64, seqs=64), 0
        for index in range(24):
            bench.add(prompt(100, index), 40)
        while not all(request.finished for request in bench.requests):
            bench.step()
            most = max(most, len(bench.scheduler.running))
        bench.finish()
        assert bench.scheduler.stats.preemptions < 24
        return most

    assert at_a_time(GEMMA2) > 1.4 * at_a_time([FULL, FULL])


def test_prompts_admitted_together_must_fit_together_with_their_windows() -> None:
    """The first has yet to grow to its window: the second must leave it that room, too."""
    bench = Bench(51, [FULL, KVGroup(4, 40)], budget=16, share=0.5)
    first, second = bench.add(prompt(60), 4), bench.add(prompt(60, 1), 4)
    bench.step()
    assert bench.scheduler.running == [first] and not second.block_ids
    bench.finish()
    assert bench.scheduler.stats.preemptions == 0


def test_slots_of_every_group_begin_where_launches_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, made = [], BatchSender._by_group

    def by_group(self: BatchSender, *given):  # type: ignore[no-untyped-def]
        common_by_group = made(self, *given)
        begins.append([common.slot_mapping.data_ptr() & 15 for common in common_by_group.values()])
        assert all(len(common.slot_mapping) == common.num_tokens for common in common_by_group.values())
        return common_by_group

    monkeypatch.setattr(BatchSender, "_by_group", by_group)
    folder = save(hf_model("qwen2-half-window", torch.float64), tmp_path)
    llm = LLM(str(folder), device="cpu", num_kv_blocks=50, max_model_len=64)
    llm.generate([[1, 2, 3], [4] * 5, [7]], SamplingParams(temperature=0, max_tokens=4))
    assert {at for group in begins for at in group} == {0} and len(begins[0]) == 2
