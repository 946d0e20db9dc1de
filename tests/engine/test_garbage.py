"""What exists when an engine starts is left out of garbage collection, and given back when the last engine is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import hf_model, save

from pagedattn.engine import LLM
from pagedattn.engine.garbage import freeze_while_alive


class Owner:
    pass


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_is_collected_again_after_the_last_owner() -> None:
    cycle = Owner()
    cycle.itself = cycle  # type: ignore[attr-defined]
    gone = weakref.ref(cycle)
    owners = [Owner(), Owner()]
    for owner in owners:
        freeze_while_alive(owner)
    del cycle, owner
    gc.collect()
    assert gone() is not None and gc.get_freeze_count() > 1000
    owners.pop()
    assert gc.get_freeze_count() > 1000
    owners.pop()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None


def test_an_engine_has_no_cycles_so_that_its_memory_is_free_at_once(tmp_path: Path) -> None:
    save(hf_model("qwen3", torch.float32), tmp_path)
    llm = LLM(tmp_path, device="cpu", num_kv_blocks=8, freeze_gc=True, log_interval=None)
    assert gc.get_freeze_count() > 1000
    llm.generate([3, 4, 5])
    gone = [weakref.ref(one) for one in (llm, llm.runner, llm.runner.cache)]  # type: ignore[attr-defined]
    gc.disable()
    try:
        del llm
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


def test_on_a_cpu_nothing_is_frozen_unasked(tmp_path: Path) -> None:
    save(hf_model("qwen3", torch.float32), tmp_path)
    llm = LLM(tmp_path, device="cpu", num_kv_blocks=8, log_interval=None)
    assert gc.get_freeze_count() == 0
    del llm
