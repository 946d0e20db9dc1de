"""The decoder over the paged cache equals transformers, whole and in chunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tiny_models import MODELS, hf_model, save

from pagedattn import CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.engine.models.config import load_model_config
from pagedattn.engine.models.decoder import Decoder
from pagedattn.engine.models.folder import ModelFolder
from pagedattn.engine.models.loader import load_weights

LENGTH = 61
WHOLE = (LENGTH,)
CHUNKS = (23, 1, 1, 30, 6)
ONES = (1,) * LENGTH
# logits of these models reach 6: float64 is exact but for norms and rope, which transformers keeps in float32
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


@cache
def reference(name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A model of transformers, a prompt, and its logits [T, vocab] by exact attention in the model's dtype."""
    model = hf_model(name, dtype)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model, ids, model(ids[None]).logits[0]


@cache
def decoder(name: str, dtype: torch.dtype, block_size: int = 16) -> Decoder:
    with TemporaryDirectory() as path:
        folder = ModelFolder(save(reference(name, dtype)[0], Path(path)))
        model = Decoder(
            load_model_config(folder), dtype=dtype, device="cpu", max_positions=LENGTH, block_size=block_size
        )
        load_weights(model, folder, torch.device("cpu"))
    return model


@torch.inference_mode()
def paged_logits(model: Decoder, ids: torch.Tensor, chunks: tuple[int, ...], block_size: int = 16) -> torch.Tensor:
    """Logits [T, vocab] of one prompt, computed chunk by chunk through a paged cache with shuffled blocks."""
    kv = PagedKVCache.from_specs(model.kv_cache_specs(block_size), 200, device="cpu")
    caches = [kv.layer(index) for index in range(kv.num_layers)]
    free = iter(torch.randperm(199, generator=torch.Generator().manual_seed(2)).add(1).split(LENGTH))
    tables = {group: next(free).int()[None] for group in range(len(kv.groups))}
    out, position = [], 0
    for size in chunks:
        common_by_group = {
            group: CommonAttentionMetadata.from_lengths(
                [size], [position + size], table, block_size=kv.groups[group].spec.block_size
            )
            for group, table in tables.items()
        }
        where = torch.arange(position, position + size)
        hidden = model(ids[where], where, caches, plan_step(model.attention_layers(), common_by_group))
        out.append(model.logits(hidden))
        position += size
    return torch.cat(out)


@pytest.mark.parametrize(
    ("dtype", "chunks"),
    [
        (torch.float64, WHOLE),
        (torch.float64, CHUNKS),
        (torch.float64, ONES),
        (torch.float32, WHOLE),
        (torch.float32, CHUNKS),
    ],
    ids=["f64-whole", "f64-chunks", "f64-ones", "f32-whole", "f32-chunks"],
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, dtype: torch.dtype, chunks: tuple[int, ...]) -> None:
    _, ids, wanted = reference(name, dtype)
    logits = paged_logits(decoder(name, dtype), ids, chunks)
    assert logits.dtype == dtype
    assert logits.shape == wanted.shape
    torch.testing.assert_close(logits.double(), wanted.double(), rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    assert len(logits.argmax(-1).unique()) > 20, "the model must not be degenerate"


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_block_size_does_not_matter(block_size: int) -> None:
    for name in ("mistral", "qwen2-half-window"):
        _, ids, wanted = reference(name, torch.float64)
        logits = paged_logits(decoder(name, torch.float64, block_size), ids, CHUNKS, block_size)
        torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=1e-6)


def test_without_a_cache(name: str = "qwen3") -> None:
    _, ids, wanted = reference(name, torch.float64)
    model = decoder(name, torch.float64)
    common = CommonAttentionMetadata.from_lengths([20, LENGTH - 20], [20, LENGTH - 20])
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 20)))
    with torch.inference_mode():
        hidden = model(ids, positions, None, plan_step(model.attention_layers(), common))
    torch.testing.assert_close(model.logits(hidden)[:20].double(), wanted[:20], rtol=0, atol=1e-6)
    assert not torch.allclose(model.logits(hidden)[20:].double(), wanted[20:], atol=1e-1)


def test_half_windowed_layers_form_two_groups() -> None:
    model = decoder("qwen2-half-window", torch.float64)
    assert [layer.kv_group for layer in model.attention_layers()] == [0, 0, 1, 1]
    assert [layer.spec.sliding_window for layer in model.attention_layers()] == [None, None, 8, 8]


def biased(**options: bool) -> dict[str, Any]:
    return {"num_hidden_layers": 2, **options}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", biased(attention_bias=True, mlp_bias=True)),
        ("qwen3", biased(attention_bias=True)),
        ("qwen3", biased(tie_word_embeddings=True)),
    ],
)
def test_biases_and_tied_embeddings(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference_model = hf_model(name, torch.float64, **changes)
    reference_model.set_attn_implementation("sdpa")
    folder = ModelFolder(save(reference_model, tmp_path))
    model = Decoder(load_model_config(folder), dtype=torch.float64, device="cpu", max_positions=64, block_size=16)
    load_weights(model, folder, torch.device("cpu"))
    ids = torch.arange(40) * 7
    with torch.inference_mode():
        wanted = reference_model(ids[None]).logits[0]
    torch.testing.assert_close(paged_logits(model, ids, (33, 7)).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": 9}),
        ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("qwen2-half-window", {"max_window_layers": 1}),
    ],
    ids=str,
)
def test_the_oracle_sees_each_feature(name: str, changes: dict[str, Any]) -> None:
    _, ids, wanted = reference(name, torch.float64)
    with torch.inference_mode():
        other = hf_model(name, torch.float64, **changes)(ids[None]).logits[0]
    assert (other - wanted).abs().max() > 0.5
    assert not torch.equal(other.argmax(-1), wanted.argmax(-1))
