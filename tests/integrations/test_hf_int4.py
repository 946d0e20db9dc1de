"""`generate` over int4 and formats with a window: recent blocks lie in a second cache, and chunks change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import VOCAB
from hf_more_models import batch, generate, model_of
from random_work import everything

import pagedattn.integrations.transformers as hf
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.integrations.transformers.rows import BlockStore

RAGGED = (90, 31, 64, 33)
WINDOW = "turboquant_k4v3:window=20"  # of two blocks of 16
FIRST = "turboquant_k4v3:window=1:first=20"  # two blocks, behind one


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: torch.Tensor, chunk: int, cache: Any = None) -> torch.Tensor:
    """Of all tokens, `chunk` to a forward."""
    cache = hf.new_cache(model) if cache is None else cache
    with torch.inference_mode():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(chunk, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("name", "stored"),
    [*((name, "int4") for name in ("llama", "mistral", "gpt_oss")), ("llama", WINDOW), ("llama", FIRST)],
)
def test_chunks_of_any_size_give_one_result(name: str, stored: str) -> None:
    model, ids = model_of(name), tokens(100)
    exact = model(ids).logits
    hf.enable(model, kv_cache_dtype=stored)
    found = {chunk: logits(model, ids, chunk) for chunk in (1, 7, 32, 100)}
    for one in found.values():
        torch.testing.assert_close(one, found[1], rtol=0, atol=1e-9)
    assert torch.allclose(found[1][:, :32], exact[:, :32], atol=1e-9), "the first block is exact"
    off = float((found[1] - exact)[:, 32:].norm() / exact[:, 32:].norm())
    assert 1e-4 < off < 0.25


def test_turboquant_has_a_window_unless_none_is_said() -> None:
    model, ids, found = model_of("llama"), tokens(40), {}
    exact = model(ids).logits
    for stored in ("turboquant4", "turboquant4:window=64", "turboquant4:window=0"):
        hf.enable(model, kv_cache_dtype=stored)
        found[stored] = logits(model, ids, 8)
    assert torch.equal(found["turboquant4"], found["turboquant4:window=64"])
    assert torch.allclose(found["turboquant4"], exact, atol=1e-9), "all of it lies in the window"
    assert float((found["turboquant4:window=0"] - exact).norm() / exact.norm()) > 1e-3


@pytest.mark.parametrize("stored", ["int4", WINDOW, FIRST])
def test_every_way_of_decoding_is_that_of_one_row_alone(stored: str) -> None:
    model, inputs = model_of("llama"), batch(*RAGGED)
    hf.enable(model, kv_cache_dtype=stored)
    ways: dict[str, dict[str, Any]] = {
        "chunks": {"prefill_chunk_size": 40},
        "assisted": {"prompt_lookup_num_tokens": 5, "inputs": 0},
    }
    if stored == "int4" or everything:
        ways |= {"greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2}}
    for name, given in ways.items():
        options: dict[str, Any] = {"max_new_tokens": 40, **given}
        rows = [row[mask.bool()][None] for row, mask in zip(*inputs.values(), strict=True)]
        if options.pop("inputs", None) == 0:
            plain = generate(model, {"input_ids": rows[1]}, max_new_tokens=40)
            assert torch.equal(generate(model, {"input_ids": rows[1]}, **options), plain), name
            continue
        found = generate(model, inputs, **options)[:, inputs["input_ids"].shape[1] :]
        alone = [generate(model, {"input_ids": row}, **options)[:, row.shape[1] :] for row in rows]
        assert torch.equal(found, torch.cat(alone)), name


def test_copies_share_full_blocks_and_go_on_apart() -> None:
    model = model_of("llama")
    hf.enable(model, kv_cache_dtype="int4", num_blocks=40)
    for length in (40, 64):
        cache, ids = hf.new_cache(model), tokens(120)
        logits(model, ids[:, :length], length, cache)
        other, used = copy.deepcopy(cache), cache.num_blocks_used
        changed = logits(model, tokens(30, seed=1), 30, other)
        assert other.num_blocks_used <= used + 2
        found = logits(model, ids[:, length:], 9, cache)
        wanted = logits(model, ids, 120)[:, length:]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
        assert not torch.allclose(changed, found[:, :30], atol=1e-3)
        alone = logits(model, torch.cat((ids[:, :length], tokens(50, seed=1)), 1), 120)
        assert torch.allclose(logits(model, tokens(50, seed=1)[:, 30:], 20, other), alone[:, length + 30 :], atol=1e-9)


def test_rows_become_others() -> None:
    model, ids = model_of("llama"), torch.cat((tokens(100), tokens(100, seed=1)))
    hf.enable(model, kv_cache_dtype="int4")
    wanted, cache = torch.cat([logits(model, row[None], 100) for row in ids]), hf.new_cache(model)
    logits(model, ids[:, :40], 40, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = logits(model, ids.flip(0)[:, 40:70], 30, cache)
    torch.testing.assert_close(found, wanted.flip(0)[:, 40:70], rtol=0, atol=1e-9)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    found = logits(model, ids[:1, 70:].expand(2, -1), 7, cache)
    torch.testing.assert_close(found, wanted[[0, 0], 70:], rtol=0, atol=1e-9)


def test_columns_that_are_taken_back() -> None:
    model, ids = model_of("llama"), tokens(200)
    hf.enable(model, kv_cache_dtype="int4")
    wanted, cache = logits(model, ids, 200), hf.new_cache(model)
    logits(model, torch.cat((ids[:, :120], tokens(50, seed=3)), 1), 17, cache)
    cache.crop(-50)
    torch.testing.assert_close(logits(model, ids[:, 120:], 11, cache), wanted[:, 120:], rtol=0, atol=1e-9)
    with pytest.raises(UnsupportedError, match=r"takes back its last 64 tokens, or all behind a multiple of 32"):
        cache.crop(40)
    torch.testing.assert_close(logits(model, ids[:, :5], 5, cache).shape, (1, 5, VOCAB))
    cache.crop(64)
    torch.testing.assert_close(logits(model, ids[:, 64:], 136, cache), wanted[:, 64:], rtol=0, atol=1e-9)


def test_open_blocks_are_handed_on_and_layers_may_be_skipped() -> None:
    model, ids = model_of("llama"), tokens(300)
    hf.enable(model, kv_cache_dtype="int4:skip=0")
    cache = hf.new_cache(model)
    found = logits(model, ids, 20, cache)
    store: BlockStore = cache._store
    assert store.recent is not None and store.num_used == 10 and store.recent.num_used <= 4
    assert [one.recent is not None for one in store.layer_caches()] == [False] + [True] * (len(store.caches) - 1)
    torch.testing.assert_close(logits(model, ids, 300), found, rtol=0, atol=1e-9)
    del cache


def test_columns_that_are_taken_back_with_a_window() -> None:
    model, ids = model_of("llama"), tokens(200)
    hf.enable(model, kv_cache_dtype=WINDOW)
    wanted, cache = logits(model, ids, 200), hf.new_cache(model)
    logits(model, torch.cat((ids[:, :110], tokens(60, seed=3)), 1), 1, cache)
    cache.crop(-60)
    torch.testing.assert_close(logits(model, ids[:, 110:], 11, cache), wanted[:, 110:], rtol=0, atol=1e-9)
    store: BlockStore = cache._store
    assert store.recent is not None and store.recent.num_used <= 2 + 1 + -(-(64 + 11) // 16)
    for columns in (40, 64):
        with pytest.raises(UnsupportedError, match=r"takes back its last 64 tokens; make a new cache"):
            cache.crop(columns)


def test_first_blocks_stay_while_those_behind_them_are_given_up() -> None:
    """Two cached rows beside each other: what one gave up the other would take."""
    model, ids = model_of("llama"), tokens(200)
    hf.enable(model, kv_cache_dtype=FIRST)
    wanted, cache, other = logits(model, ids, 200), hf.new_cache(model), tokens(200, seed=3)
    both = torch.cat((ids, other))
    found = logits(model, both, 25, cache)
    torch.testing.assert_close(found[:1], wanted, rtol=0, atol=1e-9)
    store: BlockStore = cache._store
    assert store.recent is not None and store.recent.num_used <= 2 * (2 + 2 + -(-(64 + 25) // 16))


def test_block_sizes() -> None:
    model = model_of("llama")
    with pytest.raises(InvalidInputError, match="block_size must be a multiple of 32"):
        hf.enable(model, kv_cache_dtype="int4", block_size=16)
    hf.enable(model, kv_cache_dtype="int4", block_size=64)
    assert hf.new_cache(model)._store.block_size == 64
    hf.enable(model)
    assert hf.new_cache(model)._store.block_size == 16
    with pytest.raises(InvalidInputError, match="block_size must be a multiple of 32"):
        hf.PackedModel(model, kv_cache_dtype="int4", block_size=16)
    for given, size in ((None, 32), (64, 64)):
        packed = hf.PackedModel(model, kv_cache_dtype="int4", block_size=given)
        assert {layer.spec.block_size for layer in packed.attention_layers()} == {size}
