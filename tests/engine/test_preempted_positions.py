"""Preemption at every position of a block, over formats with a second cache, changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_idle
from test_int4 import make, prompts
from tiny_models import hf_model, save

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.scheduler.scheduler import Scheduler

SIZE, OLDER, NEWER = 32, 90, 45  # blocks, and how many tokens either request generates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path_factory.mktemp("qwen3"))


def generated(llm: LLM) -> list[list[int]]:
    """The tokens of a request that keeps its blocks, and of a newer one."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (OLDER, NEWER)]
    outputs = llm.generate([prompts()[0], prompts()[3]], params, progress=False)
    check_idle(llm)
    return [[*output.outputs[0].token_ids] for output in outputs]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["int4", "turboquant4:window=20"])
def test_a_request_is_preempted_at_every_position(
    name: str, preemption: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer of two, each time that it has computed a token more than ever before."""
    options: dict[str, Any] = {"kv_cache_dtype": name, "block_size": SIZE, "preemption": preemption, "overlap": False}
    expected = generated(make(folder, **options))
    schedule, at = Scheduler._schedule_running, []

    def preempting(self: Scheduler, plan: Any) -> None:
        computed = self.running[-1].num_computed_tokens if len(self.running) == 2 else 0
        if computed >= len(prompts()[3]) and computed not in at:
            at.append(computed)
            self._preempt(self.running.pop(), plan)
        schedule(self, plan)

    monkeypatch.setattr(Scheduler, "_schedule_running", preempting)
    llm = make(folder, **options)
    assert generated(llm) == expected
    assert {computed % SIZE for computed in at} == {*range(SIZE)}
    counters = llm.stats().counters
    assert counters.preemptions == len(at) >= SIZE and (counters.swaps > 0) == (preemption == "swap")
