"""The runner and the sampler on a GPU against themselves on the CPU. Needs no transformers."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedattn import KVScales, LayerMaxima
from pagedattn.engine import LLM, Request, ScheduledRequest, SchedulerOutput
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.sampling.sampler import Sampler
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.worker import decode_graphs
from pagedattn.engine.worker.runner import ModelRunner
from pagedattn.kernels.decode import cascade

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with wide logits."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    runner = ModelRunner(EngineConfig(model=str(path), load_format="dummy", device="cpu", num_kv_blocks=2))
    views = runner.model.checkpoint_views(dict(runner.model.named_parameters()))
    tensors = {key: view if "norm" in key else view * 10 for key, view in views.items()}
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path / "model.safetensors")
    return path


def generate(runner: ModelRunner, sampling: SamplingParams) -> list[list[int]]:
    """Three requests through chunks and mixed steps, blocks by hand."""
    prompts = [list(range(3, 60)), [7], list(range(500, 533))]
    requests = []
    for index, prompt in enumerate(prompts):
        request = Request("r", array("i", prompt), sampling, arrival=0, max_total_tokens=512, seed=index)
        groups = len(runner.kv_groups)
        request.block_ids = [
            list(range(1 + 8 * (index * groups + g), 9 + 8 * (index * groups + g))) for g in range(groups)
        ]
        requests.append(request)
    for sizes in [(20, 0, 0), (37, 1, 30), *[(1, 1, 3)], *[(1, 1, 1)] * 12]:
        rows = [(request, size) for request, size in zip(requests, sizes, strict=True) if size]
        items = [
            ScheduledRequest(r, r.num_computed_tokens, n, r.num_computed_tokens + n == len(r.token_ids))
            for r, n in rows
        ]
        items.sort(key=lambda item: not (item.num_tokens == 1 and item.start > 0))
        decodes = sum(item.num_tokens == 1 and item.start > 0 for item in items)
        for item, token in zip(items, runner.execute(SchedulerOutput(tuple(items), decodes, ())), strict=True):
            item.request.num_computed_tokens += item.num_tokens
            if token is not None:
                item.request.token_ids.append(token.token_id)
    assert min(request.num_generated for request in requests) >= 12
    return [request.token_ids.tolist() for request in requests]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.8, "repetition_penalty": 1.2}], ids=str)
def test_tokens_equal_those_of_the_cpu(sampling: dict[str, Any], folder: Path) -> None:
    params = SamplingParams(**sampling)
    options: dict[str, Any] = {"model": str(folder), "num_kv_blocks": 80}
    on_gpu = generate(ModelRunner(EngineConfig(device="cuda", **options)), params)
    assert on_gpu == generate(ModelRunner(EngineConfig(device="cpu", **options)), params)
    assert len(set(on_gpu[0])) > 60, "the model must not repeat itself"


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 20, "logprobs": 2},
]


def tokens(folder: Path, kinds: list[dict[str, Any]], **options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    """Twelve requests, each of the next of `kinds`, in steps that mix them."""
    llm = LLM(str(folder), device="cuda", num_kv_blocks=400, max_num_seqs=10, max_num_batched_tokens=64, **options)
    prompts = [[3 + (7 * index + at) % 900 for at in range(5 + 9 * index)] for index in range(12)]
    params = [SamplingParams(max_tokens=24 + index, seed=index, **kinds[index % len(kinds)]) for index in range(12)]
    return [output.token_ids for output in llm.generate(prompts, params)], llm


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=["greedy", "all", "cut", "penal", "mixed"])
def test_graphs_and_overlap_give_the_tokens_of_eager_steps(kinds: list[dict[str, Any]], folder: Path) -> None:
    wanted, plain = tokens(folder, kinds, enforce_eager=True, overlap=False)
    assert plain.runner._graphs is None  # type: ignore[attr-defined]
    for options in ({"overlap": False}, {"graph_sizes": [3, 8]}, {"enforce_eager": True, "overlap": True}):
        found, llm = tokens(folder, kinds, **options)
        assert found == wanted, options
        graphs = llm.runner._graphs  # type: ignore[attr-defined]
        assert graphs is None if "enforce_eager" in options else graphs.replays > 20
    assert len({token for each in wanted for token in each}) > 60


@pytest.mark.parametrize("name", ["int4", "int4:skip=0", "turboquant2:window=40:first=4"])
def test_captured_steps_encode_the_blocks_that_they_fill(name: str, folder: Path, tmp_path: Path) -> None:
    """Over formats with a second cache, which have layers of one kind only."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "use_sliding_window": False}), encoding="utf-8")
    shutil.copy(folder / "model.safetensors", tmp_path)
    options = {"kv_cache_dtype": name, "max_model_len": 256}
    wanted, _ = tokens(tmp_path, KINDS[:2], enforce_eager=True, overlap=False, **options)
    for changes in ({"overlap": False}, {"graph_sizes": [3, 10]}, {"enforce_eager": True, "overlap": True}):
        found, llm = tokens(tmp_path, KINDS[:2], **options, **changes)
        assert found == wanted, changes
        kv, graphs = llm._scheduler.kv, llm.runner._graphs  # type: ignore[attr-defined]
        assert graphs is None if "enforce_eager" in changes else graphs.replays > 20
        assert kv.recent_pool is not None and kv.recent_pool.num_free == kv.recent_pool.num_usable
    assert wanted != tokens(tmp_path, KINDS[:2], enforce_eager=True, overlap=False, max_model_len=256)[0]


def test_captured_steps_have_the_scales_of_each_layer_and_head(folder: Path, tmp_path: Path) -> None:
    layers = [LayerMaxima((20.0 + index, 40.0), (3.0, 1.0 + index), 64, 64) for index in range(3)]
    files = {"model.safetensors": folder / "model.safetensors"}
    KVScales.measured(layers, 1, files, "").save(tmp_path / "kv_scales.json")
    options = {"kv_cache_dtype": "fp8", "kv_scales": tmp_path / "kv_scales.json"}
    wanted, _ = tokens(folder, KINDS[:1], enforce_eager=True, overlap=False, **options)
    found, llm = tokens(folder, KINDS[:1], **options)
    assert found == wanted and llm.runner._graphs.replays > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_steps_read_a_shared_prefix_once(overlap: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "_LEAST_READ_AGAIN", 1)
    lengths, shared = [], cascade.CascadeMetadata
    say = shared.set_length
    monkeypatch.setattr(shared, "set_length", lambda *args: (lengths.append(args[-1]), say(*args))[1])
    options: dict[str, Any] = {"device": "cuda", "num_kv_blocks": 400, "max_num_seqs": 10, "backend": "TRITON"}
    outputs = []
    for how in ({"enforce_eager": True, "overlap": False}, {"overlap": overlap}):
        llm, found = LLM(str(folder), **options, **how), []
        lengths.clear()
        for prefix in (70, 20, 3):
            prompts = [[*range(5, 5 + prefix), *range(200 + 9 * own, 206 + 10 * own)] for own in range(10)]
            params = [SamplingParams(temperature=0.0, max_tokens=12 + 2 * own) for own in range(10)]
            llm.generate(prompts[:1], params[:1])
            lengths.append(-prefix)
            found += [output.token_ids for output in llm.generate(prompts, params)]
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert lengths[: lengths.index(-20)].count(64) > 20
    assert lengths[lengths.index(-20) : lengths.index(-3)].count(16) > 20
    assert lengths[lengths.index(-3) :] == [-3], "what is shared is less than a block"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_launch_waits_for_nothing(kind: dict[str, Any], eager: bool, folder: Path) -> None:
    _, llm = tokens(folder, [kind], enforce_eager=eager)
    waits = []
    launch = llm.runner.launch  # type: ignore[attr-defined]

    def watched(step: SchedulerOutput) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.append(step.num_decodes)

    llm.runner.launch = watched  # type: ignore[attr-defined]
    llm.generate([[5, 6, 7], list(range(40))], SamplingParams(max_tokens=20, seed=1, **kind))
    assert len(waits) > 18 and max(waits) == 2


def test_blocks_are_sized_from_measured_memory(folder: Path) -> None:
    runner = ModelRunner(EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5))
    free, total = torch.cuda.mem_get_info()
    assert 0.4 * total < runner.cache.nbytes < 0.5 * total
    assert total - free < 0.52 * total
    assert len(generate(runner, SamplingParams(temperature=0.0))) == 3


def test_the_sampler_draws_the_same_tokens_on_both_devices() -> None:
    vocab, count = 50_000, 64
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 40, "top_p": 0.95, "logprobs": 5},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.5},
    ]
    requests = [
        Request(
            "r",
            array("i", range(index + 1)),
            SamplingParams(**kinds[index % len(kinds)]),
            arrival=0,
            max_total_tokens=999,
            seed=index,
        )
        for index in range(count)
    ]
    host = Sampler(vocab, "cpu").sample(logits, requests)
    device = Sampler(vocab, "cuda").sample(logits.cuda(), requests)
    assert [token.token_id for token in device] == [token.token_id for token in host]
    assert len({token.token_id for token in host}) > 40
    broken = logits.cuda()
    broken[3, 5] = float("nan")
    assert [token.token_id == -1 for token in Sampler(vocab, "cuda").sample(broken, requests)].index(True) == 3
