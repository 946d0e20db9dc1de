"""The fused ops' kernels against their torch paths, which the greedy grid holds against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covers import beside
from tiny_models import hf_model, save

from pagedattn import LayerCache, PagedKVCache, ops
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.models import fused_ops
from pagedattn.engine.models.kernels import fused
from pagedattn.engine.models.kernels.row_product import row_product
from pagedattn.formats.registry import FORMATS
from pagedattn.testing import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not interpreted() and DEVICE == "cpu", reason="kernels need a GPU or the interpreter")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]

QUANTISED = sorted(name for name, form in FORMATS.items() if name != "auto" and not form.whole_blocks)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order of a sum, which may move a rounding by one step."""
    step = torch.finfo(got.dtype).eps
    room = 16 if got.dtype == torch.float32 and got.is_cuda else 4  # a GPU's exp is right to a few units in float32
    torch.testing.assert_close(got, wanted, rtol=room * step, atol=room * step)
    if got.dtype != torch.float32:
        assert (got != wanted).float().mean() < 0.01, "roundings are those of torch"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels run; names of formats that are written by a launch of their own until the list is looked at."""
    written: list[str] = []
    plain = ops.reshape_and_cache
    monkeypatch.setattr(fused_ops, "fuses", lambda x: True)
    separate = SimpleNamespace(reshape_and_cache=lambda *a, **k: written.append(k["kv_cache_dtype"]) or plain(*a, **k))
    monkeypatch.setattr(fused_ops, "ops", separate)
    return written


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "fuses", lambda x: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 48, 100, 1024])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(dtype: torch.dtype, size: int, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch(monkeypatch)
    x, weight = draw(5, 2 * size, dtype=dtype)[:, :size] * 3, draw(size, dtype=dtype, seed=1)
    residual = draw(5, size, dtype=dtype, seed=2) if added else None
    summed = None if residual is None else residual.clone()
    close(fused.rms_norm(x, weight, 1e-5, summed), fused_ops.rms_norm(x, weight, 1e-5, residual))
    if residual is not None and summed is not None:
        assert torch.equal(summed, residual), "the sum is left in the residual"
        assert not torch.equal(summed, draw(5, size, dtype=dtype, seed=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 128, 1500])
def test_silu_mul(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch(monkeypatch)
    gate_up = draw(4, 2 * size + 5, dtype=dtype)[:, : 2 * size] * 4
    close(fused.silu_mul(gate_up), fused_ops.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 3, 6), (9, 1, 16), (12, 12, 8)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_turn_and_write(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch(monkeypatch)
    qkv = draw(6, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = (draw(dim, dtype=dtype, seed=1), draw(dim, dtype=dtype, seed=2)) if normed else None
    angles = draw(40, dim // 2, dtype=torch.float32, seed=3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    positions = torch.tensor([0, 39, 7, 8, 8, 3], dtype=torch.int32, device=DEVICE)
    # The sixth token has no slot, others are outside the cache.
    slots = torch.tensor([13, -1, 0, 27, 999], device=DEVICE)
    caches = []
    for path in ("torch", "triton"):
        cache = PagedKVCache(1, 7, 4, kv_heads, dim, dtype=dtype, device=DEVICE, layout=layout).layer(0)
        cache.key.fill_(7.0)
        caches.append(cache)
        if path == "torch":
            wanted = fused_ops.turn_and_write(qkv, weights, 1e-6, cos_sin, positions, cache, slots)
        else:
            given = qkv.clone()
            fused.turn_and_write(given, weights, 1e-6, cos_sin, positions, cache, slots)
            close(given[:, : heads * dim].unflatten(1, (heads, dim)), wanted)
            assert torch.equal(given[:, heads * dim :], qkv[:, heads * dim :])
    close(caches[1].key, caches[0].key)
    assert torch.equal(caches[1].value, caches[0].value)
    assert (caches[1].key == 7.0).all(-1).all(-1).sum() == 7 * 4 - 3, "three tokens are written, and nothing else"


@pytest.mark.cover(by=beside("kv_cache_dtype"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", QUANTISED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 3, 32), (12, 12, 24), (4, 1, 64)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_turn_and_write_to_a_quantised_cache(
    dtype: torch.dtype, kv_cache_dtype: str, heads: int, kv_heads: int, dim: int, layout: str, as_on_a_gpu: list[str]
) -> None:
    """One launch stores the bits that a write of the turned keys stores."""
    qkv = draw(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = (draw(dim, dtype=dtype, seed=1), draw(dim, dtype=dtype, seed=2))
    given, place, slots = qkv.clone(), turns(dim, dtype), torch.tensor([13, -1, 0, 27, 999], device=DEVICE)
    cache, wanted = (quantised_cache(kv_cache_dtype, dtype, kv_heads, dim, layout) for _ in range(2))
    query, key, value = fused_ops.turned(qkv, kv_heads, dim, weights, 1e-6, *place)
    close(fused_ops.turn_and_write(given, weights, 1e-6, *place, cache, slots), query)
    assert as_on_a_gpu == [], "no second launch writes"
    turned = given.unflatten(1, (-1, dim))[:, heads : heads + kv_heads]
    close(turned[[0, 2, 3]], key[[0, 2, 3]])
    ops.reshape_and_cache(turned, value, wanted.key, wanted.value, slots, **wanted.stored)
    assert_same_bits(cache, wanted)
    blank = quantised_cache(kv_cache_dtype, dtype, kv_heads, dim, layout)
    for plane, other in zip(cache.planes, blank.planes, strict=True):
        differs = (plane.view(torch.uint8) != other.view(torch.uint8)).flatten(2).any(-1).flatten()
        assert differs.nonzero().flatten().tolist() == [0, 13, 27], "three tokens are written, and nothing else"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("kv_heads", [3, 12])
@pytest.mark.parametrize("kind", ["float", "tensor", "head"])
def test_turn_and_write_with_scales(kv_cache_dtype: str, kv_heads: int, kind: str, as_on_a_gpu: list[str]) -> None:
    dim, dtype, slots = 8, torch.float32, torch.tensor([13, -1, 0, 27, 2], device=DEVICE)
    qkv, place = draw(5, 3 * kv_heads * dim, dtype=dtype), turns(dim, dtype)
    cache, wanted = (quantised_cache(kv_cache_dtype, dtype, kv_heads, dim, "NHD") for _ in range(2))
    every = torch.arange(1, 2 * kv_heads + 1, device=DEVICE) / 7
    scales: Any = {"float": (0.25, None), "tensor": (every[2:3], every[4:5]), "head": every.split(kv_heads)}[kind]
    fused_ops.turn_and_write(qkv, None, 1e-6, *place, cache, slots, scales)
    assert as_on_a_gpu == []
    _, key, value = qkv.unflatten(1, (-1, dim)).split(kv_heads, 1)
    given = {"k_scale": scales[0], "v_scale": scales[1]}
    ops.reshape_and_cache(key, value, wanted.key, wanted.value, slots, **given, **wanted.stored)
    assert_same_bits(cache, wanted)


def turns(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of 40 positions, and positions of five tokens."""
    angles = draw(40, dim // 2, dtype=torch.float32, seed=3)
    positions = torch.tensor([0, 39, 7, 8, 8], dtype=torch.int32, device=DEVICE)
    return torch.cat((angles.cos(), angles.sin()), 1).to(dtype), positions


def quantised_cache(kv_cache_dtype: str, dtype: torch.dtype, kv_heads: int, dim: int, layout: Any) -> LayerCache:
    options: dict[str, Any] = {"dtype": dtype, "device": DEVICE, "kv_cache_dtype": kv_cache_dtype, "layout": layout}
    cache = PagedKVCache(1, 7, 4, kv_heads, dim, **options).layer(0)
    for plane in cache.planes:
        plane.view(torch.uint8).fill_(0x55)
    return cache


def assert_same_bits(cache: LayerCache, wanted: LayerCache) -> None:
    for plane, other in zip(cache.planes, wanted.planes, strict=True):
        assert torch.equal(plane.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (128, 4), (1024, 30), (2500, 9)])
@pytest.mark.parametrize("biased", [False, True])
def test_row_product(dtype: torch.dtype, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = draw(2, inputs, dtype=dtype)[1:], draw(outputs, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if biased else None
    wide = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = torch.nn.functional.linear(x.double().abs(), weight.double().abs())  # what rounding errors are relative to
    error = (row_product(x, weight, bias).double() - wide).abs()
    assert (error <= torch.finfo(dtype).eps * wide.abs() + 1e-6 * terms).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_gpu_takes_the_kernels() -> None:
    assert fused_ops.fuses(torch.empty(1, device="cuda", dtype=torch.bfloat16))
    assert not fused_ops.fuses(torch.empty(1, device="cuda", dtype=torch.float64))


@pytest.mark.skipif(not interpreted(), reason="a GPU's engine takes the kernels in every test")
@pytest.mark.parametrize(("name", "layers"), [("qwen3", 1), ("qwen2-half-window", 3)])
def test_a_model_of_fused_ops_has_the_tokens_of_transformers(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels of a decode step but those that draw, over buffers of fixed size, as a GPU runs them."""
    seen = []
    monkeypatch.setattr(fused_ops, "fuses", lambda x: seen.append(x.dtype) or True)
    reference = hf_model(name, torch.float32, num_hidden_layers=layers)
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "backend": "TRITON",
        "num_kv_blocks": 20,
        "max_model_len": 32,
    }
    llm = LLM(str(save(reference, tmp_path)), max_num_batched_tokens=8, graph_sizes=(4,), overlap=True, **options)
    prompts = [[7, 300, 12], list(range(40, 50))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            while len(tokens) < len(prompt) + 3:
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(output.token_ids) == tokens[len(prompt) :]
    assert len(seen) > 20


@pytest.mark.skipif(not interpreted(), reason="a GPU's engine takes the kernels in every test")
@pytest.mark.parametrize("stored", ["int8", "key=int8,value=rotated_int4:skip=0"])
def test_a_model_over_quantised_caches_has_the_tokens_of_the_torch_path(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path))
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "backend": "TRITON", "num_kv_blocks": 20}
    found, layers, kernel = [], [], fused.turn_and_write
    for fuse in (False, True):
        monkeypatch.setattr(fused_ops, "fuses", lambda x, fuse=fuse: fuse)
        if fuse:
            monkeypatch.setattr(fused, "turn_and_write", lambda *a: layers.append(a[5].format) or kernel(*a))
            monkeypatch.setattr(fused_ops, "ops", None)  # no write of its own
        llm = LLM(folder, max_model_len=32, max_num_batched_tokens=8, kv_cache_dtype=stored, **options)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        found.append([output.token_ids for output in llm.generate([[7, 300, 12], list(range(40, 50))], params)])
    assert found[0] == found[1] and len(found[1][0]) == 4
    assert {*layers} == ({"int8"} if stored == "int8" else {"auto", "k8v4"})
