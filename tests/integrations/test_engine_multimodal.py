"""Checkpoints of models that take images, run by the engine as text models: tokens of their own `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import prompts
from hf_more_models import generate
from hf_multimodal import MULTIMODAL, multimodal_model
from safetensors.torch import load_file, save_file

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.models import text_part
from pagedattn.engine.models.decoder import Decoder
from pagedattn.engine.models.text_part import placeholder_tokens, text_config
from pagedattn.errors import InvalidInputError, RequestError, UnsupportedError, WeightsError

LENGTHS = (17, 3, 30)


def saved(name: str, folder: Path) -> Any:
    """The model whose checkpoint is in the folder; norms and biases are drawn in float32."""
    transformers.utils.logging.disable_progress_bar()
    model = multimodal_model(name, torch.float32)
    model.save_pretrained(folder)
    return model.double()


def make_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "device": "cpu", "block_size": 4, "max_model_len": 64, "num_kv_blocks": 200}
    return LLM(folder, **{**defaults, **options})


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts(*LENGTHS), params, progress=False)]


def wanted_of(model: Any) -> list[list[int]]:
    rows = [(one, generate(model, {"input_ids": torch.tensor([one])})[0]) for one in prompts(*LENGTHS)]
    return [row[len(one) :].tolist() for one, row in rows]


def rename(model: Any, folder: Path) -> None:
    """The other form of a checkpoint: tensors named as the class names them, and for Qwen one config for all."""
    tensors = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    assert "qwen3_vl" in model.config.model_type or tensors.keys() != load_file(folder / "model.safetensors").keys()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if raw["model_type"].startswith("qwen"):
        text = raw.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        raw = {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_tokens_equal_generate(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    wanted = wanted_of(model)
    llm = make_llm(tmp_path)
    assert isinstance(llm.runner.model, Decoder) == (name != "gemma3")
    assert tokens_of(llm) == wanted
    if name != "gemma3":
        assert tokens_of(make_llm(tmp_path, model_impl="transformers")) == wanted
    rename(model, tmp_path)
    assert tokens_of(make_llm(tmp_path)) == wanted
    assert len({token for row in wanted for token in row}) > 15


def test_images_in_a_prompt_are_refused(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "image_token_index": 7}), encoding="utf-8")
    llm = make_llm(tmp_path)
    with pytest.raises(RequestError, match=r"prompt 1: .*as a text model; got token 7 at index 1.*an image"):
        llm.generate([[5, 6], [5, 7, 6]])
    assert len(llm.generate([5, 6, 8], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize("name", MULTIMODAL)
def test_placeholders_are_those_of_transformers(name: str) -> None:
    config = transformers.CONFIG_MAPPING[name]()
    wanted = {config.image_token_id: "an image"}
    if hasattr(config, "video_token_id"):
        wanted[config.video_token_id] = "a video"
    assert placeholder_tokens(config.to_dict()) == placeholder_tokens({"model_type": name}) == wanted


def test_placeholders_of_other_configs() -> None:
    assert placeholder_tokens({"model_type": "qwen3", "audio_token_id": None}) == {}
    assert placeholder_tokens({"model_type": "gemma3n", "image_token_id": 5, "audio_token_id": 6}) == {
        5: "an image",
        6: "sound",
    }
    assert placeholder_tokens({"model_type": "gemma3", "image_token_id": 5}) == {5: "an image"}
    with pytest.raises(InvalidInputError, match=r"image_token_index in config\.json must be an integer, got '5'"):
        placeholder_tokens({"model_type": "llava", "image_token_index": "5"})


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_defaults_are_those_of_transformers(name: str) -> None:
    if name in text_part._DECODERS:
        defaults = text_part._DECODERS[name][1]
    else:
        defaults = text_part._MULTIMODAL[name].defaults
    config = transformers.CONFIG_MAPPING[name]().get_text_config()
    values = {**config.to_dict(), "rope_theta": config.rope_parameters["rope_theta"]}
    assert defaults and {key: values[key] for key in defaults} == dict(defaults)


def test_what_has_no_text_part_that_runs_is_refused(tmp_path: Path) -> None:
    llava = {"model_type": "llava", "text_config": {"model_type": "opt"}}
    with pytest.raises(UnsupportedError, match="text_config of model_type 'opt' is not supported"):
        text_config(llava)
    with pytest.raises(UnsupportedError, match=r"Gemma3ForSequenceClassification.*: Gemma3ForConditionalGeneration"):
        text_config({"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]})
    with pytest.raises(InvalidInputError, match=r"text_config in config\.json must be a JSON object"):
        text_config({"model_type": "llava", "text_config": 3})
    saved("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twice = tensors["language_model.lm_head.weight"].clone()
    save_file({**tensors, "lm_head.weight": twice}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"'lm_head.weight' is twice in the checkpoint"):
        make_llm(tmp_path)
