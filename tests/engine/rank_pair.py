"""An engine of one rank and one of two over the same tiny model, and what losing a rank may not leave behind."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_watch import has_ended
from tiny_models import hf_model, save

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.parallel.launcher import Workers
from pagedattn.errors import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LIMIT = 5.0  # seconds until a lost rank is noticed
# A model, changes of it, and options of its engines.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Two KV heads, one for each rank; a token that no prompt here has stands for an image.
    "qwen3": ("qwen3", {"image_token_id": 500}, {"preemption": "recompute"}),
    # One KV head, which both ranks have; the embedding is the head, and the last rank has fewer rows of it.
    "llama": (
        "llama3",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 509},
        {
            "preemption": "swap",
            "swap_space": 1 << 20,
            "overlap": True,
            "graph_sizes": (1, 3, 8),
            "heartbeat_timeout": 8,
        },
    ),
}


def prompts() -> list[list[int]]:
    """Six prompts of 14 to 40 tokens; the last three begin alike."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 500, (count,), generator=generator).tolist()

    shared = draw(30)
    return [*(draw(n) for n in (14, 15, 40)), *(shared + draw(n) for n in (1, 4, 9))]


def left_behind() -> set[str]:
    """What a rank could leave in the file system; the folder of temporary files is this module's own."""
    shared = [name for name in os.listdir("/dev/shm") if name.startswith(("nccl", "gloo", "torch_", "pagedattn"))]
    return {*shared, *os.listdir(tempfile.gettempdir())}


class Pair:
    """An engine of one rank and one of two, over the same folder with the same settings."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, changes, extra = MODELS[name]
        save(hf_model(kind, torch.float32, **changes), folder)
        options: dict[str, Any] = {
            "dtype": "float64",
            "device": "cpu",
            "block_size": 4,
            "num_kv_blocks": 17,  # for little more than the longest request alone
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "max_prefill_share": 0.5,
            "step_timeout": 60.0,  # so that ranks that wait for each other fail a test rather than hold it up
            **extra,
        }
        self.one = LLM(folder, **options)
        self.files = left_behind()
        self.two = LLM(folder, tensor_parallel_size=2, **options)
        self.workers: Workers = self.two.runner._workers  # type: ignore[attr-defined]
        self.pids = [process.pid for process in self.workers.processes]

    @property
    def lives(self) -> bool:
        """Whether no rank was lost."""
        try:
            self.two.step()
        except EngineDeadError:
            return False
        return True

    def check_nothing_is_left(self) -> None:
        assert all(map(has_ended, self.pids))
        assert all(channel.fileno() == -1 for channel in self.workers.channels) and not self.workers._meeting
        assert left_behind() <= self.files

    def lose(self, number: int, limit: float = LIMIT) -> str:
        """Send rank 1 a signal in the middle of a generation; returns what every pending request ends with."""
        stream = self.two.stream(prompts(), GREEDY)
        for _ in range(9):
            next(stream)
        os.kill(self.pids[1], number)
        start = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            list(stream)
        assert time.monotonic() - start < limit
        for call in (self.two.step, lambda: self.two.generate([1, 2])):
            with pytest.raises(EngineDeadError, match="rank 1 of 2"):
                call()
        self.check_nothing_is_left()
        return str(caught.value)


def tokens(llm: LLM, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts(), params)]
