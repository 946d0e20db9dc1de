"""Models whose class takes images run as text models over the paged cache: the tokens of eager attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, packed_logits, prompts
from hf_more_models import batch, generate
from hf_multimodal import MULTIMODAL, multimodal_model

import pagedattn.integrations.transformers as hf
from pagedattn.errors import UnsupportedError

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2},
    {"use_cache": False, "max_new_tokens": 4},
    {"prefill_chunk_size": 4},
)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_gives_the_tokens_of_eager_attention(name: str) -> None:
    model, inputs = multimodal_model(name), batch(17, 3, 30)
    wanted = [generate(model, inputs, **way) for way in WAYS]
    before = {part: getattr(model.config, part)._attn_implementation for part in model.config.sub_configs}
    hf.enable(model, block_size=4)
    for way, tokens in zip(WAYS, wanted, strict=True):
        assert torch.equal(generate(model, inputs, **way), tokens), way
    out = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "PagedCache"
    assert len({token for row in wanted[0].tolist() for token in row}) > 20, "the model must not be degenerate"
    hf.disable(model)
    assert before == {part: getattr(model.config, part)._attn_implementation for part in model.config.sub_configs}
    assert model.config._attn_implementation == "exact" and before["vision_config"] == "eager"


def features(model: Any) -> torch.Tensor:
    """What the tower makes of an image of 8 x 8."""
    generator = torch.Generator().manual_seed(1)
    if "qwen" in model.config.model_type:  # patches of two frames, and how many there are
        patches, grid = torch.randn(4, 3 * 2 * 4 * 4, generator=generator), torch.tensor([[1, 2, 2]])
        return model.model.get_image_features(patches, image_grid_thw=grid).pooler_output[0]
    return model.model.get_image_features(torch.randn(1, 3, 8, 8, generator=generator)).pooler_output[0]


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_loaded_by_name(name: str, tmp_path: Path) -> None:
    """The name goes to the tower too, which cannot attend by it, until the first generate enables the model."""
    transformers.utils.logging.disable_progress_bar()
    multimodal_model(name, torch.float32).save_pretrained(tmp_path)
    hf.register()
    load = partial(transformers.AutoModelForImageTextToText.from_pretrained, tmp_path, dtype=torch.float32)
    plain, model, inputs = load(attn_implementation="eager"), load(attn_implementation=hf.NAME), batch(17, 3, 30)
    with pytest.raises(UnsupportedError, match=r"no layer_idx .* runs as a text model; .* or call enable"):
        features(model)
    assert torch.equal(generate(model, inputs), generate(plain, inputs))
    assert model.config.vision_config._attn_implementation == "sdpa"
    torch.testing.assert_close(features(model), features(plain))
    hf.disable(model)
    assert model.config.vision_config._attn_implementation == hf.NAME


@pytest.mark.parametrize("name", MULTIMODAL)
@torch.inference_mode()
def test_packed_rows_of_text(name: str) -> None:
    model, tokens = multimodal_model(name), prompts(30, 20)
    wanted = [model(torch.tensor([one])).logits[0] for one in tokens]
    packed = hf.PackedModel(model, block_size=4)
    got = packed_logits(packed, tokens, ((25, 12), (1, 7), (4, 1)), 4)
    assert packed.vocab_size == wanted[0].shape[1]
    for ours, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
@torch.no_grad()
def test_images_are_refused_by_name(name: str) -> None:
    model, ids, image = multimodal_model(name), batch(9)["input_ids"], torch.zeros(1, 3, 8, 8).double()
    hf.enable(model, block_size=4)
    for call, given in (
        (lambda: model(ids, pixel_values=image), "pixel_values"),
        (lambda: generate(model, {"input_ids": ids, "pixel_values": image}), r"mm_encoder_outputs \(image\)"),
    ):
        with pytest.raises(UnsupportedError, match=f"{given} is given.*runs as a text model.*disable"):
            call()
    assert generate(model, {"input_ids": ids}).shape == (1, 21)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_placeholders_without_an_image_are_tokens_as_elsewhere(name: str) -> None:
    """transformers, too, looks up their rows of the embedding where no image is given."""
    model, inputs = multimodal_model(name), batch(17, 3, 30)
    model.config.image_token_id = 7
    inputs["input_ids"][0, -6:-2] = inputs["input_ids"][2, -9:-2] = 7
    wanted = generate(model, inputs)
    hf.enable(model, block_size=4)
    assert torch.equal(generate(model, inputs), wanted)


@torch.no_grad()
def test_kinds_of_tokens() -> None:
    """Gemma-3 lets tokens of kind 1 attend both ways."""
    model, ids = multimodal_model("gemma3"), batch(9)["input_ids"]
    wanted = generate(model, {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)})
    hf.enable(model, block_size=4)
    assert torch.equal(generate(model, {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}), wanted)
    with pytest.raises(UnsupportedError, match=r"token_type_ids is given"):
        generate(model, {"input_ids": ids, "token_type_ids": torch.ones_like(ids)})


@torch.no_grad()
def test_positions_of_three_axes() -> None:
    """Qwen-VL takes [3, B, S], or [4, B, S] with those of text in front, which alone begin sequences."""
    model, ids = multimodal_model("qwen2_vl"), torch.cat((batch(9)["input_ids"], batch(5)["input_ids"]), 1)
    apart, one = torch.cat((torch.arange(9), torch.arange(5))), torch.arange(14)
    given = [where.expand(axes, 1, -1) for where in (apart, one) for axes in (3, 4)]
    wanted = [model(ids, position_ids=positions, use_cache=False).logits for positions in given]
    hf.enable(model, block_size=4)
    for positions, logits in zip(given, wanted, strict=True):
        got = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-10)
    assert float((wanted[0] - wanted[1]).abs().max()) > 1e-2, "the fourth axis says where sequences begin"


def test_a_text_part_that_attends_both_ways_is_refused() -> None:
    config = transformers.PaliGemmaConfig(text_config=transformers.GemmaConfig(**_BASE, head_dim=16).to_dict())
    with pytest.raises(UnsupportedError, match=r"PaliGemmaForConditionalGeneration.*attends both ways"):
        hf.refuse(transformers.PaliGemmaForConditionalGeneration, config)
