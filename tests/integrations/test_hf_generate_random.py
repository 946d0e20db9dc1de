"""Random batches, block sizes and ways of decoding, over one turn or several: the tokens of eager attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hf_models import VOCAB
from hf_more_models import batch, generate, model_of
from random_work import part_of

import pagedattn.integrations.transformers as hf

NAMES = ("llama", "mistral", "gemma2", "gemma4", "granite_swa", "deepseek_v3", "gpt2", "opt", "qwen2", "exaone4")


def draw(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A model, a way of decoding, and its options."""
    name = rng.choice(NAMES)
    way = rng.choice(("greedy", "beams", "samples", "ends", "turns"))
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 25)}
    if way == "beams":
        ends = rng.choice((None, 7, list(range(3, 12))))
        options |= {"num_beams": rng.randint(2, 5), "eos_token_id": ends, "early_stopping": rng.random() < 0.5}
    elif way == "samples":
        options |= {"do_sample": True, "num_return_sequences": rng.randint(1, 4), "temperature": 0.7}
    elif way == "ends":
        options |= {"eos_token_id": list(range(3, 20))}
    if way != "turns" and rng.random() < 0.4:
        options["prefill_chunk_size"] = rng.randint(1, 12)
    return name, way, {**options, "pad_token_id": 0}


def tokens(model: Any, inputs: dict[str, torch.Tensor], way: str, options: dict[str, Any], cache: Any) -> torch.Tensor:
    """Of one generation, or of three over one cache with new tokens between them."""
    torch.manual_seed(1)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if way != "turns":
        return generate(model, inputs, **options)
    for turn in range(3):
        ids = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, **options)
        ids = torch.cat((ids, torch.randint(3, VOCAB, (len(ids), 1 + 2 * turn))), 1)
        mask = torch.cat((mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])), 1)
    return ids


@pytest.mark.parametrize("seed", range(part_of(40, 2)))
def test_tokens_equal_eager(seed: int) -> None:
    from transformers import DynamicCache

    rng = random.Random(seed)
    name, way, options = draw(rng)
    model = model_of(name)
    inputs = batch(*(rng.randint(1, 30) for _ in range(rng.randint(1, 5))))
    wanted = tokens(model, inputs, way, options, DynamicCache(config=model.config))
    fixed = rng.random() < 0.5
    hf.enable(model, block_size=rng.choice((1, 2, 3, 4, 5, 16)), num_blocks=3000 if fixed else None)
    assert torch.equal(tokens(model, inputs, way, options, hf.new_cache(model)), wanted)
    if fixed:
        assert hf.new_cache(model).num_blocks_used == 0, "every block came back"


def test_every_way_is_drawn() -> None:
    drawn = [draw(random.Random(seed)) for seed in range(part_of(40, 2))]
    assert {name for name, *_ in drawn} == {*NAMES}
    assert {way for _, way, _ in drawn} == {"greedy", "beams", "samples", "ends", "turns"}
    assert any("prefill_chunk_size" in options for *_, options in drawn)
