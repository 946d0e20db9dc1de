"""Captured steps of models that run through transformers, on a GPU: tokens of eager ones, and who is not captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import hf_model, prompts

from pagedattn.engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(folder: Path, **options: object) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens of three requests, and how many captured steps ran."""
    llm = LLM(folder, model_impl="transformers", max_model_len=64, num_kv_blocks=64, max_num_seqs=8, **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tokens = [output.token_ids for output in llm.generate(prompts(17, 3, 30), params, progress=False)]
    graphs = llm.runner._graphs
    llm.close()
    return tokens, 0 if graphs is None else graphs.replays


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_tokens_are_those_of_eager_steps(name: str, tmp_path: Path) -> None:
    dense: dict[str, Any] = {"first_k_dense_replace": 2} if name == "deepseek_v3" else {}
    hf_model(name, torch.float32, **dense).save_pretrained(tmp_path)
    (captured, replays), (eager, _) = run(tmp_path), run(tmp_path, enforce_eager=True)
    assert captured == eager and replays >= 19


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_captured_where_their_product_does_not_wait(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch has a grouped product of bfloat16 on Hopper that reads its groups on the device."""
    hf_model("deepseek_v3", dtype).save_pretrained(tmp_path)
    _, replays = run(tmp_path)
    waits = dtype == torch.float32 or torch.cuda.get_device_capability()[0] < 9
    assert (replays == 0) == waits == ("waits for the device" in caplog.text)
