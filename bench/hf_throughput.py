"""Output tokens per second, prompts included, of every way to generate for a batch of prompts with one model.

`generate` over transformers' default cache and over the paged one, transformers' continuous batching
(`generate_batch`), and the engine.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pagedattn.integrations.transformers as hf
from pagedattn.engine import LLM, SamplingParams

from .against_generate import seconds
from .ratios import Row

Prompts = Sequence[list[int]]
_REFERENCE = "generate, default cache"
_BLOCK = 16


def throughput(models: Mapping[str, Any], inputs: Mapping[str, torch.Tensor], tokens: int, runs: int) -> Row:
    """Every contender's tokens per second, the median of several runs in turns, and how far its greedy tokens agree.

    Args:
        models: "sdpa", over the default cache, and "pagedattn", enabled: the same weights.
        inputs: `input_ids` and `attention_mask` [prompts, longest], padded on the left.
        tokens: new tokens of each prompt.
        runs: timed ones; one before them is not counted.
    """
    mask = inputs["attention_mask"].bool()
    prompts = [row[kept].tolist() for row, kept in zip(inputs["input_ids"], mask, strict=True)]
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        models["sdpa"].save_pretrained(folder)
        calls: dict[str, Callable[[], list[list[int]]]] = {
            _REFERENCE: _by_generate(models["sdpa"], inputs, tokens),
            "generate, hf.enable": _by_generate(models["pagedattn"], inputs, tokens),
            **{f"generate_batch, {name}": _by_batch(models["sdpa"], name, prompts, tokens) for name in paged_names()},
            "engine": _by_engine(folder, models["sdpa"], prompts, tokens),
        }
        wanted = calls[_REFERENCE]()
        for name, call in calls.items():
            found[name] = agreement(call(), wanted)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs):
            for name, call in calls.items():
                times[name].append(seconds(call))
    for name, row in found.items():
        row |= {"tok_s": round(len(prompts) * tokens / statistics.median(times[name]), 1)}
        row |= {"seconds": [round(one, 3) for one in times[name]]}
    return {"contenders": found, "tokens": tokens, "prompts": len(prompts)}


def paged_names() -> list[str]:
    """Attention implementations that `generate_batch` runs on this machine, by transformers' names."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    flash = torch.cuda.is_available() and is_flash_attn_2_available()
    return ["paged|sdpa", *(["paged|flash_attention_2"] if flash else [])]


def agreement(output: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Row:
    """Rows of equal tokens, and the share of rows' tokens before the first that differs.

    Raises:
        ValueError: another number of rows or of tokens: such a contender did other work.
    """
    if [len(row) for row in output] != [len(row) for row in wanted]:
        raise ValueError(f"expected {len(wanted)} rows of {len(wanted[0])} tokens, got {[len(row) for row in output]}")
    same = [
        next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(other))
        for one, other in zip(output, wanted, strict=True)
    ]
    return {
        "same_rows": sum(at == len(row) for at, row in zip(same, wanted, strict=True)),
        "same_prefix": round(sum(same) / sum(map(len, wanted)), 4),
    }


def lines(row: Row) -> list[str]:
    """The row as text."""
    return [
        f"{name:>38}: {one['tok_s']:.0f} tokens/s, {one['same_rows']} of {row['prompts']} rows have the tokens of "
        f"{_REFERENCE!r}, {one['same_prefix']:.1%} of tokens come before the first that differs"
        for name, one in row["contenders"].items()
    ]


def _by_generate(model: Any, inputs: Mapping[str, torch.Tensor], tokens: int) -> Callable[[], list[list[int]]]:
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    start = inputs["input_ids"].shape[1]
    return lambda: model.generate(**inputs, **options)[:, start:].tolist()


def _by_batch(model: Any, name: str, prompts: Prompts, tokens: int) -> Callable[[], list[list[int]]]:
    """By continuous batching, whose manager lives on between calls: its graphs are captured once."""
    transformers = hf.import_transformers()
    mine = copy.deepcopy(model)
    greedy = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    fields = {one.name for one in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    blocks = sum(math.ceil((len(prompt) + tokens) / 256) for prompt in prompts)  # pages of 256, the default
    # From the release that has this setting on, the prefix is implied.
    mine.set_attn_implementation(name.removeprefix("paged|") if "auto_switch_to_flash" in fields else name)
    given = {"num_blocks": blocks, "auto_switch_to_flash": False, "allow_block_sharing": False}
    config = transformers.ContinuousBatchingConfig(**{key: value for key, value in given.items() if key in fields})

    def call() -> list[list[int]]:
        outputs = mine.generate_batch(
            [*prompts], generation_config=greedy, continuous_batching_config=config, persistent_manager=True
        )
        return [[*output.generated_tokens] for output in outputs.values()]

    return call


def _by_engine(folder: str, model: Any, prompts: Prompts, tokens: int) -> Callable[[], list[list[int]]]:
    longest = max(map(len, prompts)) + tokens
    llm = LLM(
        Path(folder),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=longest,
        num_kv_blocks=len(prompts) * (longest // _BLOCK + 2) + 1,
        enable_prefix_caching=False,
        log_interval=None,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return lambda: [[*output.token_ids] for output in llm.generate([*prompts], params, progress=False)]
