"""Quantised caches in the engine: bytes, and tokens that do not depend on how steps were cut or where blocks lay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import hf_model, save

from pagedattn import KVCacheDtype, plan_step
from pagedattn.engine import LLM, EngineConfig, SamplingParams
from pagedattn.engine.worker import decode_graphs
from pagedattn.errors import InvalidInputError
from pagedattn.integrations import transformers as hf

MIXED = "int8:skip=0,-1"
FORMATS = ("int8", "k8v4", "turboquant4:window=0", "fp8", "fp8_e5m2", MIXED)
# Products of other sizes may differ in their last bits, and then an element is stored as the code beside its own, which
# the coarser a format is, the more it changes log-probabilities: at most by so much.
STEP = {"int8": 0.01, MIXED: 0.01, "k8v4": 0.1, "turboquant4:window=0": 0.2, "fp8": 0.1, "fp8_e5m2": 0.2}
PROMPTS = [[5, 9, 200, 31, 7] * 4, [44, 3, 90], [8, 8, 300, 17, 25, 60, 12, 99, 101]]
NEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("qwen3", torch.float32), tmp_path_factory.mktemp("qwen3"))


def run(folder: Path, **options: Any) -> tuple[list[list[int]], list[float], LLM]:
    """Tokens, their log-probabilities, and the engine."""
    given = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "log_interval": None, "block_size": 4}
    llm = LLM(folder, **given | options)
    outputs = llm.generate(PROMPTS, NEW, progress=False)
    chosen = [number for output in outputs for number in output.outputs[0].logprobs or ()]
    return [[*output.token_ids] for output in outputs], chosen, llm


def kind_of(name: str) -> list[object]:
    """What tells formats apart for an engine: whether layers differ, and whose scales those of codes are."""
    return ["of layers" if name == MIXED else "one scale" if name.startswith("fp8") else "scales of rows"]


@pytest.mark.cover(by=kind_of)
@pytest.mark.parametrize("name", FORMATS)
def test_both_kinds_of_model_and_generate_store_the_same(folder: Path, name: str) -> None:
    exact = run(folder)[1]
    tokens, native, _ = run(folder, kv_cache_dtype=name)
    others, other, _ = run(folder, kv_cache_dtype=name, model_impl="transformers")
    assert tokens == others
    assert max(abs(a - b) for a, b in zip(native, other, strict=True)) < 1e-3
    assert max(abs(a - b) for a, b in zip(native, exact, strict=True)) > 1e-4, "nothing was rounded"
    model = _model(folder)
    hf.enable(model, block_size=4, kv_cache_dtype=name)
    for prompt, wanted in zip(PROMPTS, tokens, strict=True):
        found = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert found[0, len(prompt) :].tolist() == wanted


def _model(folder: Path) -> Any:
    transformers = hf.import_transformers()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.cover(by=kind_of)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_do_not_depend_on_how_steps_are_cut_or_where_blocks_go(folder: Path, name: str) -> None:
    tokens, chosen, _ = run(folder, kv_cache_dtype=name)
    tight = {"num_kv_blocks": 14, "max_num_batched_tokens": 7, "max_prefill_share": 1.0}
    for preemption in ("recompute", "swap"):
        others, other, llm = run(folder, kv_cache_dtype=name, preemption=preemption, swap_space=1 << 20, **tight)
        assert llm.stats().counters.preemptions > 0
        assert _largest_difference(tokens, chosen, others, other) < STEP[name]
    again, _, llm = run(folder, kv_cache_dtype=name)
    repeated = [[*output.token_ids] for output in llm.generate(PROMPTS, NEW, progress=False)]
    assert again == repeated == tokens and llm.stats().counters.cached_tokens > 0


def _largest_difference(
    tokens: list[list[int]], chosen: list[float], others: list[list[int]], other: list[float]
) -> float:
    """Of the chosen tokens' log-probabilities, up to the first tokens that differ, those included."""
    largest = 0.0
    for n, (ones, twos) in enumerate(zip(tokens, others, strict=True)):
        for step, (a, b) in enumerate(zip(ones, twos, strict=True)):
            largest = max(largest, abs(chosen[n * len(ones) + step] - other[n * len(ones) + step]))
            if a != b:
                break
    return largest


def test_blocks_take_the_bytes_of_their_format(folder: Path) -> None:
    # Keys and values of 2 heads of 32 in 4 layers, blocks of 4 tokens; scales of a token and head take 4 or 2 bytes.
    elements, layers = 2 * 4 * 2 * 32, 4
    expected = {"auto": 4 * elements, "fp8": elements, "int8": elements + 2 * 4 * 2 * 4}
    expected["k8v4"] = expected["int8"] - elements // 4
    expected["turboquant4:window=0"] = elements // 2 + 2 * 4 * 2 * 2
    # All layers in one slab, of a whole number of the largest row, of 2 heads of float32.
    row = 2 * 32 * 4
    expected[MIXED] = -(-2 * (expected["auto"] + expected["int8"]) // row) * row
    for name, size in expected.items():
        _, _, llm = run(folder, kv_cache_dtype=name)
        cache: Any = llm.runner.cache  # type: ignore[attr-defined]
        assert cache.bytes_per_block == size and cache.nbytes == 64 * size * (1 if name == MIXED else layers)


def test_layers_that_are_skipped_are_exact(folder: Path) -> None:
    exact, stored = run(folder)[1], "int8:skip="
    errors = {}
    for skipped in ("", "0", "0,1,2,3"):
        name = stored + skipped if skipped else "int8"
        found, llm = run(folder, kv_cache_dtype=name)[1:]
        errors[skipped] = sum(abs(a - b) for a, b in zip(found, exact, strict=True))
        kept = [layer.spec.kv_cache_dtype for layer in llm.runner.model.attention_layers()]  # type: ignore[attr-defined]
        assert kept == ["auto" if str(index) in skipped.split(",") else "int8" for index in range(4)]
    assert 0 == errors["0,1,2,3"] < errors["0"] < errors[""]


def test_captured_steps_write_slots_of_every_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, chosen, _ = run(folder, kv_cache_dtype=MIXED)

    def with_own_tensors(layers: Any, common: Any, into: Any = None, capture: bool = False) -> Any:
        return plan_step(layers, common, into, capture=into is None)  # as on a GPU

    monkeypatch.setattr(decode_graphs, "plan_step", with_own_tensors)
    monkeypatch.setattr("pagedattn.backends.op_backend.check_capture", lambda *_: None)
    others, other, llm = run(folder, kv_cache_dtype=MIXED, graph_sizes=(4,))
    assert llm.runner._graphs.replays > 5  # type: ignore[attr-defined]
    assert others == tokens and max(abs(a - b) for a, b in zip(chosen, other, strict=True)) < STEP[MIXED]


def test_values_beyond_fp8_are_said_once(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(folder)
    model.model.layers[2].self_attn.v_proj.weight.data *= 1500
    save(model, tmp_path)
    for name, said in (("fp8", 1), ("fp8_e5m2", 0), ("int8", 0)):
        caplog.clear()
        _, _, llm = run(tmp_path, kv_cache_dtype=name)
        llm.generate(PROMPTS, NEW, progress=False)
        texts = [one.getMessage() for one in caplog.records if "cut off" in one.getMessage()]
        assert len(texts) == said, name
        assert all("of the values of layer 2 reach 448" in text and "'int8'" in text for text in texts)
    caplog.clear()
    run(folder, kv_cache_dtype="fp8")
    assert "cut off" not in caplog.text


def test_a_format_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype must be one of auto, .*int8.*got 'int3'"):
        run(folder, kv_cache_dtype="int3")
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype must be the name of a format, .* got 8"):
        EngineConfig.from_options(folder, {"kv_cache_dtype": 8})
    model = _model(folder)
    for kind in ("native", "transformers"):
        with pytest.raises(InvalidInputError, match=r"skip_layers must be layers in \[-4, 4\), got 4"):
            run(folder, kv_cache_dtype=KVCacheDtype("int8", (4,)), model_impl=kind)
    with pytest.raises(InvalidInputError, match="skip_layers must be layers"):
        hf.enable(model, kv_cache_dtype="int8:skip=9")
    with pytest.raises(InvalidInputError, match="kv_cache_dtype must be one of"):
        hf.enable(model, kv_cache_dtype="int3")
    assert model.config._attn_implementation != "pagedattn"
