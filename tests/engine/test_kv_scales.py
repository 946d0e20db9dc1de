"""Scales of fp8 caches in the engine: from a calibration or the checkpoint, and none of another model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import FACTOR, KEY_LAYER, TEXT, VALUE_HEAD, VALUE_LAYER, make
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, on_ranks
from tiny_models import hf_model, save

from pagedattn import KVScales
from pagedattn.engine import LLM, EngineConfig, SamplingParams, calibrate
from pagedattn.engine.models import factory
from pagedattn.engine.models.config import refuse_quantised_weights
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.engine.models.sharding import ShardedDecoder
from pagedattn.engine.parallel import driver
from pagedattn.engine.worker.kv_maxima import KVMaxima
from pagedattn.errors import InvalidInputError, UnsupportedError, WeightsError

TOKENS = torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [TOKENS[:length] for length in range(4, 60)]
NEXT = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KVScales]:
    return make(tmp_path_factory.mktemp("enlarged"))


@pytest.fixture
def folder(made: tuple[Path, KVScales]) -> Path:
    return made[0]


def run(folder: Path, **options: Any) -> tuple[torch.Tensor, torch.Tensor, LLM]:
    """The token after each prompt, its log-probability, and the engine."""
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 256, "block_size": 4}
    llm = LLM(folder, **given | options)
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS, NEXT, progress=False)]
    numbers = [number for one in outputs for number in one.logprobs or ()]
    return torch.tensor([one.token_ids[0] for one in outputs]), torch.tensor(numbers), llm


def given_scales(llm: LLM) -> list[tuple[Any, Any]]:
    return [layer.kv_scales for layer in llm.runner.model.attention_layers()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_large_keys_and_values_need_the_calibration(folder: Path, name: str, impl: str, caplog: Any) -> None:
    exact, wanted, _ = run(folder, model_impl=impl)
    same, error = {}, {}
    for path in (None, folder / "kv_scales.json"):
        caplog.clear()
        tokens, numbers, llm = run(folder, model_impl=impl, kv_cache_dtype=name, kv_scales=path)
        same[path], error[path] = float((tokens == exact).float().mean()), float((numbers - wanted).abs().mean())
        assert ("`pagedattn calibrate MODEL TEXT_FILE`" in caplog.text) == (path is None)
        assert (str(folder / "kv_scales.json") in llm.describe_attention()) == (path is not None)
    assert same[path] > 0.7 and same[None] < 0.5
    assert error[path] < error[None] * (0.5 if name == "fp8" else 0.7)  # e5m2 rounds to 2 bits


def test_a_calibration_is_the_largest_key_and_value_of_each_head(made: tuple[Path, KVScales]) -> None:
    folder, scales = made
    assert scales.num_tokens == 1200 and list(scales.checkpoint) == ["model.safetensors"] and scales.version
    assert [(len(one.key), one.head_dim, one.head_dim_v) for one in scales.layers] == [(2, 32, 32)] * 4
    tokens = LLM(folder, device="cpu").runner.tokenizer.encode(TEXT)[:1200]  # type: ignore[union-attr]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    size = model.config.max_position_embeddings - 1
    found = torch.zeros(4, 2, 2)
    for first in range(0, len(tokens), size):
        with torch.no_grad():
            cache = model(torch.tensor([tokens[first : first + size]]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            both = torch.stack([layer.keys[0], layer.values[0]]).abs().amax((2, 3))
            found[index] = torch.maximum(found[index], both)
    kept = torch.tensor([[one.key, one.value] for one in scales.layers])
    torch.testing.assert_close(kept, found, rtol=1e-4, atol=1e-4)
    maxima, few = KVMaxima(), {"max_num_batched_tokens": 100, "max_num_seqs": 8, "enable_prefix_caching": False}
    llm = LLM(folder, device="cpu", **few)  # which takes a dozen steps
    llm.runner.observer = maxima  # type: ignore[attr-defined]
    llm.generate([tokens[first : first + size] for first in range(0, len(tokens), size)], NEXT, progress=False)
    again = torch.tensor([[one.key, one.value] for one in maxima.layers()])
    torch.testing.assert_close(again, kept, rtol=1e-4, atol=1e-4)
    assert kept[KEY_LAYER, 0].min() > FACTOR > 100 * kept[VALUE_LAYER, 0].max()
    assert kept[VALUE_LAYER, 1, VALUE_HEAD] > 1000 * kept[VALUE_LAYER, 1, 1 - VALUE_HEAD]


def test_nobody_is_told_of_no_scales_where_they_are_given(
    made: tuple[Path, KVScales], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, scales = made
    halves = [replace(one, key=tuple(number / 2 for number in one.key)) for one in scales.layers]
    replace(scales, layers=tuple(halves)).save(tmp_path / "halves.json")  # which cut off
    run(folder, kv_cache_dtype="fp8", kv_scales=tmp_path / "halves.json")
    assert "no scales" not in caplog.text


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_the_scales_of_its_heads(made: tuple[Path, KVScales], size: int) -> None:
    folder, scales = made
    whole = scales.scales("fp8")
    config = EngineConfig(model=folder, kv_cache_dtype="fp8", kv_scales=folder / "kv_scales.json")  # type: ignore[arg-type]

    def work(ranks: ThreadRanks) -> list[tuple[Any, Any]]:
        model = factory._native(config, ModelFolder(folder), CPU, partial(ShardedDecoder, ranks))
        return [layer.kv_scales for layer in model.attention_layers()]

    for rank, found in enumerate(on_ranks(size, work)):
        head = rank * 2 // size
        for (key, value), (all_keys, all_values) in zip(found, whole, strict=True):
            assert key.tolist() == [all_keys[head]] and value.tolist() == [all_values[head]]


def with_scales(folder: Path, to: Path, scales: dict[str, torch.Tensor], **config: Any) -> Path:
    """A copy of a model folder with more tensors and other entries of config.json."""
    shutil.copytree(folder, to)
    (to / "kv_scales.json").unlink()
    save_file(load_file(to / "model.safetensors") | scales, to / "model.safetensors", {"format": "pt"})
    raw = json.loads((to / "config.json").read_text(encoding="utf-8"))
    (to / "config.json").write_text(json.dumps(raw | config), encoding="utf-8")
    return to


SCHEME = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_scales_of_a_checkpoint_are_used(made: tuple[Path, KVScales], impl: str, tmp_path: Path) -> None:
    folder, scales = made
    names = ("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_scale")
    pairs = [(float(key.max()), float(value.max())) for key, value in scales.scales("fp8")]
    stored = {f"model.layers.{n}.{name}": torch.tensor(pairs[n][0]) for n, name in enumerate(names)}
    stored |= {f"model.layers.{n}.self_attn.v_scale": torch.tensor([pairs[n][1]]) for n in range(3)}
    stored["model.layers.0.self_attn.kv_scale"] = stored.pop("model.layers.0.self_attn.k_scale")
    del stored["model.layers.0.self_attn.v_scale"]
    copy = with_scales(folder, tmp_path / "model", stored, quantization_config=SCHEME)
    tokens, _, llm = run(copy, model_impl=impl, kv_cache_dtype="fp8")
    kept = [tuple(None if one is None else pytest.approx(one) for one in pair) for pair in given_scales(llm)]
    assert kept == [(pairs[0][0],) * 2, pairs[1], pairs[2], (pairs[3][0], None)]
    assert "the checkpoint" in llm.describe_attention()
    exact, _, llm = run(copy, model_impl=impl)  # a cache that has no use for them
    assert given_scales(llm) == [(None, None)] * 4
    lost, _, _ = run(folder, model_impl=impl, kv_cache_dtype="fp8")
    assert (tokens == exact).sum() > (lost == exact).sum()  # one scale of both heads is not enough for this model


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_scales_of_each_head_and_of_others_in_a_checkpoint(
    made: tuple[Path, KVScales], impl: str, tmp_path: Path
) -> None:
    """One per KV head, as what projections give out, beside one for all; those of queries are not read."""
    folder, scales = made
    pairs, stored = scales.scales("fp8"), dict[str, torch.Tensor]()
    for index, (key, value) in enumerate(pairs):
        layer = f"model.layers.{index}.self_attn"
        stored |= {f"{layer}.q_scale": torch.tensor(0.5), f"{layer}.attn.prob_scale": torch.tensor(0.5)}
        stored |= {f"{layer}.k_proj.output_scale": key, f"{layer}.v_scale": value if index else value.max()[None]}
    copy = with_scales(folder, tmp_path / "model", stored, quantization_config=SCHEME)
    tokens, _, llm = run(copy, model_impl=impl, kv_cache_dtype="fp8")
    for index, (pair, want) in enumerate(zip(given_scales(llm), pairs, strict=True)):
        assert torch.equal(pair[0], want[0]) and torch.equal(pair[1], want[1] if index else want[1].max().expand(2))
    if impl == "native":
        wanted, _, _ = run(folder, kv_cache_dtype="fp8", kv_scales=folder / "kv_scales.json")
        assert (tokens == wanted).float().mean() > 0.9


@pytest.mark.parametrize("wrong", [[-1.0], [0.0], [float("nan")], [1.0, -2.0], [1.0, 2.0, 3.0], []])
def test_a_scale_of_a_checkpoint_that_is_none_is_refused(folder: Path, wrong: list[float], tmp_path: Path) -> None:
    copy = with_scales(folder, tmp_path / "model", {"model.layers.1.self_attn.v_scale": torch.tensor(wrong)})
    with pytest.raises(
        WeightsError, match=r"(layers\.1\.self_attn\.v_scale|of layer 1)' must be positive .*pagedattn calibrate"
    ):
        run(copy, kv_cache_dtype="fp8")
    run(copy, kv_cache_dtype="int8")


@pytest.mark.parametrize("given", [{"config_groups": {"group_0": {}}}, {"kv_cache_scheme": None}])
def test_weights_that_are_quantised_too_are_refused(given: dict[str, Any]) -> None:
    refuse_quantised_weights({"quantization_config": SCHEME})
    with pytest.raises(UnsupportedError, match="quantised weights"):
        refuse_quantised_weights({"quantization_config": SCHEME | given})


def test_what_is_of_another_model_is_refused_before_weights_are_loaded(
    made: tuple[Path, KVScales], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scales = made
    for module, name in ((factory, "load_weights"), (factory, "Decoder"), (driver, "Workers")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("loaded"))
    other = save(hf_model("qwen3", torch.float32, initializer_range=0.1), tmp_path / "other")
    short = save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path / "short")
    wide = save(hf_model("qwen3", torch.float32, num_key_value_heads=4), tmp_path / "wide")
    known = str(folder / "kv_scales.json")
    for model, said in (
        (other, "kv_scales must be of the checkpoint that is loaded, got .*, which has another model.safetensors; run"),
        (short, r"kv_scales must be of a model with 2 layers, got 4 in .*kv_scales\.json; run `pagedattn calibrate"),
        (wide, r"kv_scales must be of a model with \(4, 32, 32\) .* in layer 0, got \(2, 32, 32\) in .*; run"),
    ):
        for size in (1, 2):
            with pytest.raises(InvalidInputError, match=said):
                LLM(model, device="cpu", kv_cache_dtype="fp8", kv_scales=known, tensor_parallel_size=size)
    for name in ("int8", "k8v4", "turboquant2", "auto"):
        with pytest.raises(InvalidInputError, match=f"kv_scales must be None for kv_cache_dtype='{name}'.*set|give"):
            LLM(folder, kv_cache_dtype=name, kv_scales=known)
    with pytest.raises(InvalidInputError, match="kv_scales must be the path of a file"):
        LLM(folder, kv_cache_dtype="fp8", kv_scales=3)
    replace(scales, checkpoint={"model-00001-of-00002.safetensors": "0"}).save(tmp_path / "sharded.json")
    with pytest.raises(InvalidInputError, match=r"which has a model-00001-of-00002\.safetensors"):
        LLM(folder, device="cpu", kv_cache_dtype="fp8", kv_scales=tmp_path / "sharded.json")


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_layers_that_are_skipped_take_no_scales(made: tuple[Path, KVScales], kind: str) -> None:
    _, _, llm = run(made[0], kv_cache_dtype="fp8:skip=1,-1", kv_scales=made[0] / "kv_scales.json", model_impl=kind)
    layers = llm.runner.model.attention_layers()  # type: ignore[attr-defined]
    assert [layer.kv_scales[0] is not None for layer in layers] == [True, False, True, False]


def test_a_calibration_of_other_shapes_is_refused_by_transformers_models(
    made: tuple[Path, KVScales], tmp_path: Path
) -> None:
    folder, scales = made
    replace(scales, layers=scales.layers[:3]).save(tmp_path / "cut.json")
    with pytest.raises(InvalidInputError, match="of a model with 4 layers, got 3"):
        run(folder, kv_cache_dtype="fp8", kv_scales=tmp_path / "cut.json", model_impl="transformers")


def test_what_cannot_be_calibrated_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_tokens must be a positive integer, got 0"):
        calibrate(folder, TEXT, max_tokens=0)
    with pytest.raises(InvalidInputError, match="text must be at least one token long, got ''"):
        calibrate(folder, "", device="cpu")
    bare = save(hf_model("qwen3", torch.float32), tmp_path / "bare")
    with pytest.raises(UnsupportedError, match="calibrate needs a tokenizer"):
        calibrate(bare, TEXT, device="cpu")
    model = hf_model("qwen3", torch.float32)
    model.model.layers[3].self_attn.v_proj.weight.data *= 1e38
    shutil.copy(folder / "tokenizer.json", save(model, tmp_path / "endless"))
    with pytest.raises(InvalidInputError, match=r"keys and values are finite, got values of layer 3 .*bfloat16"):
        calibrate(tmp_path / "endless", TEXT, max_tokens=40, device="cpu", dtype="float16")
