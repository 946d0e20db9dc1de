"""Greedy tokens equal those of transformers, whatever the chunking, caching, preemption, block size and batch."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from covers import cover, pairs, values
from random_work import everything
from tiny_models import hf_model, save

from pagedattn.engine import LLM, SamplingParams

NEW_TOKENS = 28


class Axes(NamedTuple):
    """One point of the grid."""

    model: str
    dtype: torch.dtype
    chunk: int  # 0 is whole prompts
    prefix: str
    pool: str
    preemption: str
    block_size: int
    batch: int
    graphs: bool  # on a CPU a graph is a plain call over the same buffers
    overlap: bool


# The cover has more of what comes first, which takes the fewest steps.
LEVELS: dict[str, tuple[Any, ...]] = {
    "model": ("qwen3", "qwen2", "llama3", "mistral", "qwen2-mostly-window"),
    "dtype": (torch.float64, torch.float32),
    "chunk": (0, 7, 1),
    "prefix": ("off", "on", "hot"),
    "pool": ("ample", "tight"),
    "preemption": ("recompute", "swap"),
    "block_size": (4, 16),
    "batch": (8, 1),
    "graphs": (False, True),
    "overlap": (False, True),
}
GRID = [Axes(*point) for point in itertools.product(*LEVELS.values())]


COVER = [GRID[index] for index in cover([pairs(**axes._asdict()) for axes in GRID])]


def prompts() -> list[list[int]]:
    """Eight prompts of 13 to 50 tokens, short ones first, so that they grow together; the last four begin alike."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 512, (count,), generator=generator).tolist()

    shared = draw(35)
    return [*(draw(n) for n in (14, 15, 13, 50)), *(shared + draw(n) for n in (1, 4, 9, 13))]


oracle = cache(hf_model)


@cache
@torch.inference_mode()
def greedy(model: str, dtype: torch.dtype, prompt: tuple[int, ...], tokens: tuple[int, ...], **changes: int) -> int:
    """How many of `tokens`, from the first on, transformers chooses too, each behind those before it."""
    ids = torch.tensor([[*prompt, *tokens]])
    chosen = oracle(model, dtype, **changes)(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return int((chosen == ids[0, len(prompt) :]).cumprod(0).sum())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of the tiny models."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(hf_model(name, torch.float32), root / name) for name in LEVELS["model"]}


def run(axes: Axes, folder: Path) -> None:
    longest = -(-(50 + NEW_TOKENS) // axes.block_size)
    # A window of 8 gives blocks back, so that a request holds two of 16 or three of 4 tokens at the most.
    windowed = {16: 4, 4: 6}[axes.block_size]
    mostly = longest + {16: 8, 4: 18}[axes.block_size]
    tight = {"mistral": windowed, "qwen2-mostly-window": mostly}.get(axes.model, longest + 2)
    llm = LLM(
        str(folder),
        dtype=str(axes.dtype),
        device="cpu",
        block_size=axes.block_size,
        num_kv_blocks=tight if axes.pool == "tight" else 4 * (8 * longest + 8),
        max_num_seqs=axes.batch,
        max_num_batched_tokens=32 if axes.chunk else 1024,
        max_prefill_share=axes.chunk / 32 if axes.chunk else 1.0,
        enable_prefix_caching=axes.prefix != "off",
        graph_sizes=(1, 3, 8) if axes.graphs else None,
        overlap=axes.overlap,
        preemption=axes.preemption,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts(), params)
    if axes.prefix == "hot":
        outputs = llm.generate(prompts(), params)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output.token_ids) == NEW_TOKENS
        assert greedy(axes.model, axes.dtype, tuple(prompt), tuple(output.token_ids)) == NEW_TOKENS
    happened(axes, llm)


def happened(axes: Axes, llm: Any) -> None:
    """Every axis that should leave a trace did."""
    counters = llm.stats().counters
    groups = {"mistral": 1, "qwen2-mostly-window": 4}.get(axes.model)
    if axes.pool == "tight" and groups is not None:
        # The longest request does not fit at once: it ended because its windows' blocks were released.
        assert llm.stats().num_blocks * axes.block_size < groups * (50 + NEW_TOKENS)
    if axes.pool == "tight" and axes.model != "mistral" and axes.batch == 8:
        assert counters.preemptions > 0
        assert (counters.recomputed_tokens > 0) == (axes.preemption == "recompute")
        assert (counters.swapped_out_blocks > 0) == (axes.preemption == "swap")
    if axes.pool == "ample":
        assert counters.preemptions == 0
        # Prompts in chunks below a block, which run together, do not find each other's beginnings; all others do.
        assert counters.cached_tokens == 0 or axes.prefix != "off"
        assert (
            counters.cached_tokens > 0
            or axes.prefix == "off"
            or (axes.prefix == "on" and axes.batch == 8 and axes.chunk)
        )
    graphs = llm.runner._graphs
    assert graphs.replays > 20 if axes.graphs else graphs is None
    assert llm._loop.overlap == axes.overlap
    if axes.chunk:
        rounds = 2 if axes.prefix == "hot" else 1
        assert counters.steps > rounds * (NEW_TOKENS - 1) + 50 // axes.chunk - 1
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def facets(axes: Axes) -> list[object]:
    """A preemption is what axes meet in: of a step in flight, and by either way."""
    return [*values(**axes._asdict()), (axes.pool, axes.preemption), (axes.pool, axes.overlap)]


@pytest.mark.cover(by=facets)
@pytest.mark.parametrize("axes", COVER, ids=str)
def test_pairs_of_axes(axes: Axes, folders: dict[str, Path]) -> None:
    run(axes, folders[axes.model])


@pytest.mark.grid
@pytest.mark.parametrize("axes", GRID if everything else [], ids=str)  # thousands, which take seconds to collect
def test_full_grid(axes: Axes, folders: dict[str, Path]) -> None:
    run(axes, folders[axes.model])


def test_the_cover_is_a_cover() -> None:
    assert len(GRID) == 5760 and len(COVER) < 30
    for (i, first), (j, second) in itertools.combinations(enumerate(LEVELS.values()), 2):
        assert {(point[i], point[j]) for point in COVER} == set(itertools.product(first, second))


def test_the_oracle_sees_the_window() -> None:
    prompt = torch.tensor(prompts()[-1:])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    tokens = oracle("mistral", torch.float64).generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    both = tuple(prompt[0].tolist()), tuple(tokens[0, prompt.shape[1] :].tolist())
    assert greedy("mistral", torch.float64, *both) == NEW_TOKENS
    assert greedy("mistral", torch.float64, *both, sliding_window=512) < NEW_TOKENS
