"""Blocks that are swapped while the GPU runs ahead of the host arrive where and when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner_gpu import CONFIG, folder  # noqa: F401  (a fixture)

from pagedattn import PagedKVCache
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.worker.block_copier import BlockCopier

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_requests_have_the_tokens_of_requests_left_alone(folder: Path, caching: bool) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, CONFIG["vocab_size"], (20 + 3 * n,), generator=generator).tolist() for n in range(16)]
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    tokens, swapped = [], []
    for num_kv_blocks in (600, 40):
        options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "num_kv_blocks": num_kv_blocks}
        llm = LLM(
            str(folder),
            **options,
            preemption="swap",
            swap_space=1 << 28,
            enable_prefix_caching=caching,
            max_num_seqs=16,
        )
        outputs = llm.generate(prompts, sampling, progress=False)
        tokens.append([output.token_ids for output in outputs])
        swapped.append(llm.stats().counters.swapped_in_blocks)
    assert swapped[0] == 0 and swapped[1] > 10
    assert tokens[0] == tokens[1]


def test_host_memory_is_pinned_and_no_larger_than_asked_for() -> None:
    cache = PagedKVCache(2, 3, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(2):  # the first one's is given back before the second's is taken
        mover = BlockCopier(cache, 1025)
        assert mover._host.slabs.is_pinned()
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
        del mover
