"""What the two tokens of a probe tell of a model: windows, positions, and code that has no place in a paged step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, build, hf_model, packed_logits, prompts, reference_logits
from hf_more_models import generate

from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.integrations.transformers import PackedModel, enable, refuse


@pytest.mark.parametrize("limit", [6, 7, 8, 9])
def test_a_window_that_only_the_mask_has_and_no_position_leaves(limit: int) -> None:
    """Rotary positions run on past max_position_embeddings, and so does the window."""
    model, tokens = hf_model("qwen2_moe", attention="exact", max_position_embeddings=limit), prompts(30, 20)
    wanted = reference_logits(model, tokens)
    packed = PackedModel(model, block_size=4)
    assert [layer.spec.sliding_window for layer in packed.attention_layers()] == [8, 8]
    torch.testing.assert_close(
        torch.cat(packed_logits(packed, tokens, ((30, 12), (0, 8)), 4)), torch.cat(wanted), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("kind", ["RobertaConfig", "CamembertConfig", "XLMRobertaXLConfig"])
def test_positions_that_do_not_begin_at_0_are_found(kind: str) -> None:
    """Where nobody gives positions they begin after padding_idx, so that an engine's, from 0, would be others."""
    config = getattr(transformers, kind)(**{**_BASE, "pad_token_id": 1, "is_decoder": True})
    model = build(config, attention="exact")
    inputs = {"input_ids": torch.tensor(prompts(9)), "attention_mask": torch.ones(1, 9)}
    wanted = generate(model, inputs)
    with pytest.raises(UnsupportedError, match=r"does not count positions from 0.*enable\(model\)"):
        PackedModel(model)
    assert model.config._attn_implementation == "exact"
    enable(model)
    assert torch.equal(generate(model, inputs), wanted)


def test_a_model_whose_code_fails_in_the_probe() -> None:
    """Doge cuts its mask; an attribute of a config that differs from layer to layer cannot be read of the whole."""
    window = {"sliding_window": 20, "per_layer_config": {"0": {"sliding_window": 3}}}
    for model, message in (
        (build(transformers.DogeConfig(**_BASE)), r"DogeForCausalLM fails on two tokens.*IndexError"),
        (build(transformers.MistralConfig(**{**_BASE, **window})), r"MistralForCausalLM fails.*'sliding_window' is a"),
    ):
        for run in (PackedModel, enable):
            with pytest.raises(UnsupportedError, match=message):
                run(model)
            assert model.config._attn_implementation == "eager"


def test_a_config_that_differs_where_it_is_read_as_a_whole() -> None:
    config = transformers.LlamaConfig(**{**_BASE, "per_layer_config": {"0": {"max_position_embeddings": 3}}})
    with pytest.raises(UnsupportedError, match=r"Llama.*differs from layer to layer.*'max_position_embeddings'"):
        refuse(transformers.LlamaForCausalLM, config)


@pytest.mark.parametrize("run", [PackedModel, enable])
def test_what_is_no_language_model(run: Any) -> None:
    for given in (None, torch.nn.Linear(2, 2), torch.compile(hf_model("llama"), backend="eager")):
        with pytest.raises(InvalidInputError, match=f"model must be a PreTrainedModel, got {type(given).__name__}"):
            run(given)
    with pytest.raises(UnsupportedError, match=r"LlamaModel (gives no logits|has no decoder of its own under a lang)"):
        run(hf_model("llama").model)
