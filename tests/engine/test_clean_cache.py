"""Steps say which blocks were handed out for them, so that a runner can promise a cache without leftovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_bench import Bench, prompt
from tiny_models import hf_model, save

from pagedattn.engine import LLM, KVGroup, SamplingParams, SchedulerOutput
from pagedattn.engine.worker.runner import ModelRunner


@pytest.mark.parametrize("swap_blocks", [0, 99])
def test_a_slot_that_is_not_written_was_zeroed(swap_blocks: int) -> None:
    """Behind the last token of every table there are zeros, also where blocks were swapped in or copied."""
    bench = Bench(40, [KVGroup(4), KVGroup(4, 6)], budget=24, swap_blocks=swap_blocks)
    for index in range(12):
        bench.add([*prompt(8), *prompt(4 + index, index)], 16)
    tails = 0
    while not all(request.finished for request in bench.requests):
        step = bench.step()
        assert step is not None and len(set(step.fresh_blocks)) == len(step.fresh_blocks)
        for request in bench.scheduler.running:
            for slots, table in zip(bench.runner._slots, request.block_ids, strict=True):
                used = (request.num_computed_tokens - 1) % 4 + 1
                assert not slots[4 * table[-1] + used : 4 * table[-1] + 4].any()
                tails += used < 4
    assert tails > 100 and (bench.scheduler.stats.swaps > 0) == (swap_blocks > 0)
    bench.finish()


def test_blocks_of_a_failed_step_are_named_again() -> None:
    bench = Bench()
    bench.add(prompt(9))
    first = bench.scheduler.schedule()
    assert first is not None
    bench.scheduler.rollback(first)
    second = bench.scheduler.schedule()
    assert second is not None and len(second.fresh_blocks) == len(first.fresh_blocks) == 3
    bench.scheduler.rollback(second)
    bench.finish()


def test_a_clean_cache_holds_only_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are poisoned whenever nobody holds them; with clean_cache no step sees the poison, without it one does."""
    folder = save(hf_model("qwen2-half-window", torch.float32), tmp_path)
    execute = ModelRunner.execute

    def poisoned(clean: bool) -> bool:
        seen = []

        def checked(self: ModelRunner, step: SchedulerOutput) -> Any:
            out = execute(self, step)
            held = {block for item in step.scheduled for table in item.request.block_ids for block in table if block}
            seen.extend(bool(self.cache.slabs.view(torch.float32)[:, block].isnan().any()) for block in held)
            rest = [block for block in range(1, self.cache.num_blocks) if block not in held]
            self.cache.slabs.view(torch.float32)[:, rest] = float("nan")
            return out

        monkeypatch.setattr(ModelRunner, "execute", checked)
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 24, "block_size": 4}
        llm = LLM(str(folder), **options, clean_cache=clean, enable_prefix_caching=False, max_num_seqs=1)
        llm.generate([list(range(3, 20)), list(range(9, 30))], SamplingParams(temperature=0.0, max_tokens=6))
        assert len(seen) > 50
        return any(seen)

    assert not poisoned(clean=True) and poisoned(clean=False)
