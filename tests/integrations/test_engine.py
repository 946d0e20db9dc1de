"""The engine over transformers' own modules: tokens of `generate`, whatever the schedule; and who runs what."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import _BASE, MODELS, MORE, VOCAB, build, hf_model, prompts

import pagedattn.integrations.transformers as hf
from pagedattn import MLASpec
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.models import factory
from pagedattn.engine.models.decoder import Decoder
from pagedattn.engine.models.transformers import TransformersModel
from pagedattn.errors import (
    CapacityError,
    InvalidInputError,
    NoBackendError,
    PagedAttnError,
    SecurityError,
    UnsupportedError,
    WeightsError,
)

NEW_TOKENS = 20
NATIVE = ("llama", "qwen2", "mistral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> the folder of a tiny model in float32, saved on first use."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        hf_model(name, torch.float32).save_pretrained(path)
        return path

    return folder


def ragged() -> list[list[int]]:
    """Seven prompts; the last three begin alike."""
    first = prompts(17, 3, 30, 9, 24, 1, 5)
    return [*first[:4], first[4] + first[5], first[4] + first[6], first[4]]


@cache
def generated(name: str) -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time."""
    model, out = hf_model(name), []
    for prompt in ragged():
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        out.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return out


def make_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "device": "cpu", "block_size": 4, "max_model_len": 64, "num_kv_blocks": 200}
    return LLM(folder, **{**defaults, **options})


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(ragged(), params, progress=False)]


WINDOWED, HYBRID = {"mixtral", "phi3", "mistral"}, {"gemma2", "gemma3", "gpt_oss", "qwen2"}


@pytest.mark.cover(by=lambda name: [(name in WINDOWED, name in HYBRID, name == "deepseek_v3")])
@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3"])
def test_tokens_equal_generate(name: str, folders: Any) -> None:
    """Chunks of 6 beside decodes, too few blocks for all, prefixes shared; then again, with the prefixes cached."""
    windowed = name in WINDOWED
    blocks = 7 if windowed else 22 if name in HYBRID else 18
    llm = make_llm(
        folders(name), model_impl="transformers", num_kv_blocks=blocks, max_num_batched_tokens=12, max_prefill_share=0.5
    )
    assert tokens_of(llm) == generated(name)
    counters = llm.stats().counters
    # Whom a window bounds is admitted with room for all that it will ever hold, and is never preempted.
    assert (counters.preemptions > 0) == (counters.recomputed_tokens > 0) == (not windowed)
    assert counters.steps > NEW_TOKENS + 5
    roomy = make_llm(folders(name), model_impl="transformers")
    assert tokens_of(roomy) == tokens_of(roomy) == generated(name)
    assert roomy.stats().counters.cached_tokens > 20 and roomy.stats().counters.preemptions == 0
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_latent_models_keep_rows(folders: Any) -> None:
    llm = make_llm(folders("deepseek_v3"))
    cache = llm.runner.cache
    assert cache.groups[0].specs == (MLASpec(head_dim=24, latent_dim=16, block_size=4, dtype=torch.float64),) * 2
    assert cache.nbytes == cache.num_blocks * 4 * 2 * 24 * 8
    assert "latent" in llm.runner.describe()
    for expanded in ({"kv_cache_dtype": "int8"}, {"latent": False}):
        specs = make_llm(folders("deepseek_v3"), **expanded).runner.cache.groups[0].specs
        assert not any(isinstance(spec, MLASpec) for spec in specs) and specs[0].num_kv_heads > 1
    with pytest.raises(InvalidInputError, match=r"^kv_scales must be None with latent=True"):
        make_llm(folders("deepseek_v3"), kv_cache_dtype="fp8", kv_scales="scales.json", latent=True)
    with pytest.raises(UnsupportedError, match=r"kv_cache_dtype='int8' is not served for the latent rows"):
        make_llm(folders("deepseek_v3"), kv_cache_dtype="int8", latent=True)
    with pytest.raises(InvalidInputError, match="latent must be a bool, got 'rows'"):
        make_llm(folders("deepseek_v3"), latent="rows")
    for impl, name in (("native", "the engine's own decoder"), ("transformers", "LlamaForCausalLM"), ("auto", "Llama")):
        with pytest.raises(UnsupportedError, match=f"latent=True, but {name}.* cannot keep latent rows"):
            make_llm(folders("llama"), model_impl=impl, latent=True)


def test_latent_rows_of_e4m3_under_any_schedule(folders: Any) -> None:
    """Chunks beside decodes, preempted requests, cached and shared prefixes: the tokens of one request at a time."""
    model, alone = hf_model("deepseek_v3", torch.float64), []
    hf.enable(model, block_size=4, kv_cache_dtype="fp8")
    for prompt in ragged():
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
        alone.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    assert alone != generated("deepseek_v3")
    few = {"num_kv_blocks": 18, "max_num_batched_tokens": 12, "max_prefill_share": 0.5}
    for options in (few, {**few, "preemption": "swap", "swap_space": 1 << 20}, {}):
        llm = make_llm(folders("deepseek_v3"), kv_cache_dtype="fp8", **options)
        (spec, _), cache = llm.runner.cache.groups[0].specs, llm.runner.cache
        assert isinstance(spec, MLASpec) and spec.format.name == "fp8_e4m3"
        assert cache.nbytes == cache.num_blocks * 4 * 2 * 24
        assert tokens_of(llm) == alone
        assert (llm.stats().counters.preemptions > 0) == bool(options)
        assert "scales of the fp8_e4m3 cache: 1.0" in llm.runner.describe()
    assert tokens_of(llm) == alone and llm.stats().counters.cached_tokens > 20


def test_rows_of_656_bytes_are_those_of_generate(tmp_path: Path) -> None:
    """Over `fp8_ds_mla` the engine and an enabled model read the same rounded rows."""
    sizes = {**_BASE, **MORE["deepseek_v3"][1], "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    config = transformers.DeepseekV3Config(**sizes)
    build(config, torch.float32).save_pretrained(tmp_path)
    model = build(config, torch.float64)
    asked, alone = prompts(17, 3, 9), []
    hf.enable(model, block_size=4, kv_cache_dtype="fp8_ds_mla", num_blocks=30)
    assert hf.new_cache(model).nbytes == 30 * 4 * 2 * 656
    for prompt in asked:
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        alone.append(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    llm = make_llm(tmp_path, kv_cache_dtype="fp8_ds_mla", num_kv_blocks=20, max_num_batched_tokens=12)
    assert llm.runner.cache.groups[0].specs[0].format.name == "fp8_ds_mla"
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False)
    assert [list(one.outputs[0].token_ids) for one in outputs] == alone


def test_latent_rows_beyond_e4m3_are_said(folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = hf_model("deepseek_v3", torch.float32)
    model.model.layers[1].self_attn.kv_a_layernorm.weight.data *= 1500
    model.save_pretrained(tmp_path)
    for folder, said in ((folders("deepseek_v3"), 0), (tmp_path, 1)):
        caplog.clear()
        tokens_of(make_llm(folder, kv_cache_dtype="fp8"))
        texts = [one.getMessage() for one in caplog.records if "cut off" in one.getMessage()]
        assert len(texts) == said and all("of the latent rows of layer 1 reach 448" in text for text in texts)


def test_the_models_are_not_degenerate() -> None:
    for name in MODELS:
        assert len({token for tokens in generated(name) for token in tokens}) >= 25, name


def test_auto_takes_the_engines_own_decoder_where_there_is_one(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in NATIVE:
        assert isinstance(make_llm(folders(name)).runner.model, Decoder)
        assert isinstance(make_llm(folders(name), model_impl="native").runner.model, Decoder)
    with caplog.at_level("INFO", "pagedattn"):
        model = make_llm(folders("gemma2")).runner.model
    assert isinstance(model, TransformersModel) and model.name == "Gemma2ForCausalLM"
    assert "Gemma2ForCausalLM runs through transformers" in caplog.text
    with pytest.raises(UnsupportedError, match="'gemma2' is not supported"):
        make_llm(folders("gemma2"), model_impl="native")
    with pytest.raises(InvalidInputError, match="model_impl"):
        make_llm(folders("gemma2"), model_impl="hf")


def test_without_transformers_only_the_engines_own_decoder_runs(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = folders("llama"), folders("gemma2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(make_llm(own).runner.model, Decoder)
    with pytest.raises(UnsupportedError, match=r"own decoder.*'gemma2'.*transformers >= 5.*pagedattn\[hf\]"):
        make_llm(other)


def test_what_stops_both_implementations_is_told_once(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = altered(folders("llama"), tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match=r"^quantised weights .*; use the original model$"):
        make_llm(quantised)
    monkeypatch.setattr(factory, "load_transformers_model", lambda *args: pytest.fail("read for the same backends"))
    with pytest.raises(NoBackendError, match=r"^backend FLASH_ATTN, asked for by argument, ") as told:
        make_llm(folders("llama"), backend="FLASH_ATTN")
    assert str(told.value).count("cannot serve") == 1


@pytest.mark.parametrize("name", NATIVE)
def test_both_implementations_give_the_same_tokens(name: str, folders: Any) -> None:
    assert tokens_of(make_llm(folders(name), model_impl="native")) == generated(name)


def test_windows_give_blocks_back(folders: Any) -> None:
    """A sequence longer than the whole cache ends where all layers are windowed."""
    llm = make_llm(folders("mixtral"), num_kv_blocks=9, max_num_batched_tokens=8)
    output = llm.generate([prompts(40)[0]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    assert len(output.token_ids) == 20 and 60 > 8 * 4


def test_dummy_weights(folders: Any) -> None:
    first, second, other = (make_llm(folders("gemma3"), load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert tokens_of(first) == tokens_of(second) != tokens_of(other)
    assert first.runner.model.dtype == torch.float64


def test_shape_is_read_from_the_folder(folders: Any) -> None:
    runner = make_llm(folders("gpt_oss"), max_model_len=None).runner
    assert (runner.max_model_len, runner.vocab_size, tuple(runner.eos_token_ids)) == (256, VOCAB, (2,))
    with pytest.raises(InvalidInputError, match=r"max_model_len.*256.*got 257"):
        make_llm(folders("gpt_oss"), max_model_len=257)


def altered(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder with other values in its config; ... removes one."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (target / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...}), encoding="utf-8"
    )
    return target


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, SecurityError, "auto_map"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantization_config"),
        ({"model_type": "no-such-model"}, UnsupportedError, "own decoder.*transformers.*'no-such-model'"),
        ({"model_type": "bert"}, UnsupportedError, "architectures"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, UnsupportedError, "no attention interface"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, UnsupportedError, "no causal language model"),
        ({"architectures": ["Gemma2ForSequenceClassification"]}, UnsupportedError, "it is Gemma2ForCausalLM"),
        ({"hidden_size": 48}, WeightsError, "do not fit|does not fit"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, WeightsError, r"missing.*model\.layers\.2\."),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, WeightsError, r"unexpected.*model\.layers\.1\."),
        ({"num_attention_heads": "four"}, InvalidInputError, "config.json must be one that transformers reads"),
    ],
    ids=str,
)
def test_bad_folders_are_refused(
    changes: dict[str, Any], error: type[PagedAttnError], message: str, folders: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        make_llm(altered(folders("gemma2"), tmp_path, **changes))


def test_a_model_is_refused_before_more_is_asked_for_it(tmp_path: Path) -> None:
    """Mamba's config has no max_position_embeddings, which is of no use to know."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"MambaForCausalLM \(mamba\) cannot run.*it is stateful"):
        make_llm(tmp_path, max_model_len=None)


def test_keys_that_choose_code_are_not_followed(folders: Any, tmp_path: Path) -> None:
    """A config may name kernels of the Hub, pickles, or patches; none of these is a model's shape."""
    keys = ("_attn_implementation", "attn_implementation", "_experts_implementation", "transformers_weights")
    folder = altered(folders("mixtral"), tmp_path, **dict.fromkeys(keys, "someone/kernels"), fusion_config={"x": True})
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}', encoding="utf-8")
    assert tokens_of(make_llm(folder)) == generated("mixtral")


def test_pickled_weights_are_never_read(folders: Any, tmp_path: Path) -> None:
    folder = altered(folders("gemma2"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin was found.*never loaded"):
        make_llm(folder)


def test_a_step_out_of_memory_is_taken_back(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(folders("gemma2"))
    logits = llm.runner.model.logits

    def fail(_hidden: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(llm.runner.model, "logits", logits)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(llm.runner.model, "logits", fail)
    with pytest.raises(CapacityError, match="injected"):
        tokens_of(llm)
    assert tokens_of(llm) == generated("gemma2")
