"""Steps of decodes in buffers of fixed sizes, of models that run through transformers: which, and with which tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import hf_model, prompts

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.worker import sync_check
from pagedattn.errors import UnsupportedError

SIZES = (1, 4)


def make_llm(name: str, folder: Path, **options: Any) -> LLM:
    hf_model(name, torch.float32).save_pretrained(folder)
    defaults = {"dtype": "float64", "device": "cpu", "block_size": 4, "max_model_len": 64, "num_kv_blocks": 200}
    return LLM(folder, model_impl="transformers", **{**defaults, **options})


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts(17, 3, 30), params, progress=False)]


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_eager_steps(name: str, tmp_path: Path) -> None:
    """Three requests in a size of four, latent rows, experts, windows and caps of logits among the models."""
    captured = make_llm(name, tmp_path, graph_sizes=SIZES)
    assert tokens_of(captured) == tokens_of(make_llm(name, tmp_path)) and captured.runner._graphs is not None
    assert captured.runner._graphs.replays == 11 and captured.runner._graphs._logits.dtype == torch.float32


def test_a_model_that_torch_compile_does_not_take_whole_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(hf_model("gemma2")), "_can_compile_fullgraph", False)
    assert make_llm("gemma2", tmp_path, graph_sizes=SIZES).runner._graphs is None


def _fails(message: str) -> Callable[[], None]:
    def run() -> None:
        raise RuntimeError(message)

    return run


def test_a_step_that_waits_is_refused_and_the_mode_of_torch_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [1]
    monkeypatch.setattr(sync_check.torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(sync_check.torch.cuda, "set_sync_debug_mode", modes.append)
    sync_check.run_without_waiting(lambda: modes.append("ran"))
    assert modes == [1, "error", "ran", 1]
    with pytest.raises(UnsupportedError, match="waits for the device in a forward"):
        sync_check.run_without_waiting(_fails("called a synchronizing CUDA operation"))
    with pytest.raises(RuntimeError, match=r"^another$"):
        sync_check.run_without_waiting(_fails("another"))
    assert modes[-4:] == ["error", 1, "error", 1]
