"""The fused ops' kernels against their torch paths, which the greedy grid holds against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import hf_model, save

from pagedattn import PagedKVCache, ops
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.models import fused_ops
from pagedattn.engine.models.kernels import fused
from pagedattn.engine.models.kernels.row_product import row_product
from pagedattn.testing import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not interpreted() and DEVICE == "cpu", reason="kernels need a GPU or the interpreter")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order of a sum, which may move a rounding by one step."""
    step = torch.finfo(got.dtype).eps
    room = 16 if got.dtype == torch.float32 and got.is_cuda else 4  # a GPU's exp is right to a few units in float32
    torch.testing.assert_close(got, wanted, rtol=room * step, atol=room * step)
    if got.dtype != torch.float32:
        assert (got != wanted).float().mean() < 0.01, "roundings are those of torch"


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
            fused.turn_and_write(given, weights, 1e-6, cos_sin, positions, cache.key, cache.value, slots)
            close(given[:, : heads * dim].unflatten(1, (heads, dim)), wanted)
            assert torch.equal(given[:, heads * dim :], qkv[:, heads * dim :])
    close(caches[1].key, caches[0].key)
    assert torch.equal(caches[1].value, caches[0].value)
    assert (caches[1].key == 7.0).all(-1).all(-1).sum() == 7 * 4 - 3, "three tokens are written, and nothing else"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "k8v4", "turboquant_k4v3", "fp8"])
def test_turn_and_write_to_a_quantised_cache(
    dtype: torch.dtype, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim, tokens = 6, 3, 32, 5
    qkv, angles = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), draw(40, dim // 2, dtype=dtype, seed=3)
    cos_sin = torch.cat((angles.float().cos(), angles.float().sin()), 1).to(dtype)
    positions = torch.tensor([0, 39, 7, 8, 8], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([13, -1, 0, 27, 999], device=DEVICE)
    weights = (draw(dim, dtype=dtype, seed=1), draw(dim, dtype=dtype, seed=2))
    by_torch(monkeypatch)
    options: dict[str, Any] = {"dtype": dtype, "device": DEVICE, "kv_cache_dtype": kv_cache_dtype}
    cache, wanted = (PagedKVCache(1, 7, 4, kv_heads, dim, **options).layer(0) for _ in range(2))
    query, key, value = fused_ops.turned(qkv, kv_heads, dim, weights, 1e-6, cos_sin, positions)
    monkeypatch.setattr(fused_ops, "fuses", lambda x: True)
    given = qkv.clone()
    close(fused_ops.turn_and_write(given, weights, 1e-6, cos_sin, positions, cache, slots), query)
    heads_of = given.unflatten(1, (-1, dim))
    close(heads_of[:, heads : heads + kv_heads], key)
    assert torch.equal(heads_of[:, heads + kv_heads :], value)
    ops.reshape_and_cache(
        heads_of[:, heads : heads + kv_heads], value, wanted.key, wanted.value, slots, **wanted.stored
    )
    for plane, other in zip(cache.planes, wanted.planes, strict=True):
        assert torch.equal(plane.view(torch.uint8), other.view(torch.uint8))
    assert cache.key.view(torch.uint8).any() and cache.value.view(torch.uint8).any()


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
