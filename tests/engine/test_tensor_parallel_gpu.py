"""Two ranks over NCCL on two GPUs: the tokens of one GPU, eager and captured, and no rank left behind when one dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner_gpu import KINDS, folder, tokens

from pagedattn.engine import LLM, SamplingParams
from pagedattn.errors import EngineDeadError

__all__ = ["folder"]
SILENCE = 3.0  # seconds without a sign of life, after which a rank is lost
LIMIT = SILENCE + 5.0  # until the driver has said so
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    "options",
    [{}, {"graph_sizes": [3, 8]}, {"overlap": False}, {"enforce_eager": True}],
    ids=["usual", "sizes", "serial", "eager"],
)
def test_tokens_are_those_of_one_gpu(options: dict[str, Any], folder: Path) -> None:
    wanted, _ = tokens(folder, KINDS, enforce_eager=True, overlap=False)
    found, two = tokens(folder, KINDS, tensor_parallel_size=2, **options)
    two.close()
    assert found == wanted
    assert len({token for each in wanted for token in each}) > 60


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_lost_rank_ends_the_engine_and_all_its_processes(how: signal.Signals, folder: Path) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 400, "tensor_parallel_size": 2, "max_num_batched_tokens": 64}
    llm = LLM(str(folder), device="cuda", heartbeat_timeout=SILENCE, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    processes = llm.runner._workers.processes  # type: ignore[attr-defined]
    llm.add_request(list(range(20)), SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        llm.step()
    os.kill(processes[1].pid, how)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1"):
        while True:
            llm.step()
    assert time.monotonic() - start < LIMIT
    assert all(process.poll() is not None for process in processes)
