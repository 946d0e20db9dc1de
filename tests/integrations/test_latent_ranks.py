"""Latent models of transformers over several ranks: heads are shared, rows on every rank, tokens those of one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import hf_model, prompts
from random_work import everything
from test_hf_latent import KINDS, latent_model
from thread_ranks import ThreadRanks, on_ranks

from pagedattn import CommonAttentionMetadata, KVScales, MLASpec, PagedKVCache, plan_step
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.models import latent_sharding
from pagedattn.engine.models.latent_sharding import check_logits, keep_heads, logits_of
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.fp8.calibration_file import LayerMaxima
from pagedattn.integrations.transformers import PackedModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=5, n=2, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_of_all_ranks_are_the_model(kind: str, size: int) -> None:
    model = latent_model(kind, torch.float64, "exact")
    whole = logits_of(model)
    attention = next(module for module in model.modules() if hasattr(type(module), "expand_kv"))
    width = attention.kv_b_proj.weight.shape[0]

    def work(ranks: ThreadRanks) -> tuple[int, Any, dict[str, int]]:
        share = copy.deepcopy(model)
        keep_heads(share, ranks)
        check_logits(share, whole)
        counts = dict(ranks.counts)
        packed = PackedModel(share, block_size=4)
        cut = next(module for module in share.modules() if hasattr(type(module), "expand_kv"))
        return cut.kv_b_proj.weight.shape[0], packed, counts

    for rows, packed, counts in on_ranks(size, work):
        assert rows * size == width
        layers = packed.attention_layers()
        assert counts == {"all_reduce": len(layers), "all_gather": 0}
        assert {layer.spec.num_heads for layer in layers} == {4 // size}
        assert {type(spec) for spec in packed.kv_cache_specs(4)} == {MLASpec}
        assert packed.kv_cache_specs(4)[0].head_dim == layers[0].spec.head_dim == 48


def _without_a_part(module: Any) -> None:
    module.o_proj = torch.nn.Sequential(module.o_proj)


def _gated(module: Any) -> None:
    """An output that depends on the number of heads, as no check of widths can see."""
    module.register_forward_hook(lambda one, _args, out: (out[0] * one.num_heads, out[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_part, "o_proj of DeepseekV3Attention is no plain linear layer of 4 heads"),
        (_gated, "computes something else once its heads are shared between ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: Any, message: str) -> None:
    model = latent_model("v3", torch.float64, "exact")
    for layer in model.model.layers:
        change(layer.self_attn)
    whole = logits_of(model)

    def work(ranks: ThreadRanks) -> str:
        share = copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match=message):
            keep_heads(share, ranks)
            check_logits(share, whole)
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no latent attention that could be cut"):
        on_ranks(1, lambda ranks: keep_heads(hf_model("llama"), ranks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v3")
    hf_model("deepseek_v3", torch.float32).save_pretrained(path)
    return path


def make_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "device": "cpu", "block_size": 4, "max_model_len": 64, "step_timeout": 60.0}
    return LLM(folder, **{**defaults, "max_num_batched_tokens": 12, "max_prefill_share": 0.5, **options})


FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
SCALES: dict[str, Any] = {**FP8, "kv_scales": "scales.json"}
LESS: list[dict[str, Any]] = [FP8, {}, {"latent": False}]  # what these do, less the scales or the format
OPTIONS = [SCALES, *(pytest.param(one, marks=pytest.mark.grid) for one in LESS)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_ranks_have_the_tokens_of_one(folder: Path, options: dict[str, Any]) -> None:
    """Chunked beside decodes, preempted for lack of blocks, with cached prefixes; greedy and sampled."""
    first = prompts(17, 3, 30, 9, 24, 1, 5)
    asked, found = [*first[:4], first[4] + first[5], first[4] + first[6], first[4]], []
    if "kv_scales" in options:  # of each head another one
        layer = LayerMaxima((1.0, 2.0, 3.0, 40.0), (50.0, 4.0, 3.0, 2.0), head_dim=16, head_dim_v=12)
        options = {**options, "kv_scales": str(folder / "scales.json")}
        files = {one.name: one for one in folder.glob("*.safetensors")}
        KVScales.measured([layer] * 2, 100, files, "0").save(options["kv_scales"])
    again = [GREEDY] if everything else []
    for size in (1, 2):
        llm = make_llm(folder, tensor_parallel_size=size, num_kv_blocks=18, **options)
        outputs = [one for params in (*again, GREEDY, SAMPLED) for one in llm.generate(asked, params, progress=False)]
        found.append([[completion.token_ids for completion in output.outputs] for output in outputs])
        counters = llm.stats().counters
        assert counters.preemptions > 0 and counters.cached_tokens > 0
        expanded = "latent" in options or "kv_scales" in options
        assert ("it serves latent attention (MLA) only" in llm.runner.describe()) == expanded
        llm.close()
    assert found[0] == found[1]


@torch.inference_mode()
def _hidden(model: Any, **options: Any) -> torch.Tensor:
    """Of nine tokens, in two steps over one cache."""
    packed, ids = PackedModel(model, block_size=4, **options), torch.arange(3, 12)
    layers, cache = packed.attention_layers(), PagedKVCache.from_specs(packed.kv_cache_specs(4), 5, device="cpu")
    caches, out = [cache.layer(i) for i in range(len(layers))], []
    for new, end in ((7, 7), (2, 9)):
        common = CommonAttentionMetadata.from_lengths([new], [end], torch.tensor([[4, 1, 3]]).int(), block_size=4)
        at = torch.arange(end - new, end)
        out.append(packed(ids[at], at, caches, plan_step(layers, common)))
    return torch.cat(out)


def test_every_rank_reads_the_same_rows_of_e4m3() -> None:
    model = latent_model("v3", torch.float64, "exact")
    wanted, exact = (_hidden(copy.deepcopy(model), **options) for options in (FP8, {}))
    assert float((wanted - exact).abs().max()) > 1e-4

    def work(ranks: ThreadRanks) -> torch.Tensor:
        share = copy.deepcopy(model)
        keep_heads(share, ranks)
        return _hidden(share, **FP8)

    for got in on_ranks(2, work):
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)


def test_ranks_that_do_not_divide_the_heads_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor_parallel_size=3: 4 query heads .*; possible: \[1, 2, 4\]"):
        make_llm(folder, tensor_parallel_size=3)
    with pytest.raises(UnsupportedError, match="'deepseek_v3' is not supported"):
        make_llm(folder, tensor_parallel_size=2, model_impl="native")
    with pytest.raises(InvalidInputError, match=r"kv_scales must be a file"):
        make_llm(folder, tensor_parallel_size=2, kv_cache_dtype="fp8", kv_scales=str(folder / "none.json"))
    monkeypatch.setattr(latent_sharding, "is_latent", lambda *_: False)
    with pytest.raises(UnsupportedError, match="'deepseek_v3' is not supported"):
        make_llm(folder, tensor_parallel_size=2)
