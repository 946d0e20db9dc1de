"""What layers over two caches, and their metadata, refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recent_sequences import DIM, HEADS, KEY, KV_HEADS, QUERY, SIZE, VALUE, Sequences, mixed

from pagedattn import Attention, AttentionType, CommonAttentionMetadata, Mask, PagedKVCache
from pagedattn.cache.specs import SlidingWindowSpec
from pagedattn.errors import InvalidInputError, UnsupportedError


def call(common: CommonAttentionMetadata, **changes: Any) -> None:
    owner = Sequences("TORCH")
    owner.layer(*(x[:40] for x in (QUERY, KEY, VALUE)), changes.get("cache", owner.cache.layer(0)), common)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = mixed([40], [40])
    with pytest.raises(InvalidInputError, match="recent_table must be given for a cache of kv_cache_dtype='int4'"):
        call(step.replace(recent_table=None))
    plain = PagedKVCache(1, 9, SIZE, KV_HEADS, DIM, kv_cache_dtype="int4", recent_blocks=3)
    host = plain.over(torch.zeros_like(plain.slabs))
    with pytest.raises(InvalidInputError, match="kv_cache must be with `recent`"):
        call(step, cache=host.layer(0))
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    with pytest.raises(InvalidInputError, match="recent_table must be given"):
        call(step.replace(recent_table=None))
    with pytest.raises(InvalidInputError, match="kv_cache must be a cache of int4 with `recent`"):
        call(step, cache=host.layer(0))
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    call(step)
    with pytest.raises(InvalidInputError, match=r"recent_table must be blocks in .*, got 99 at row 0, column 1"):
        call(step.replace(recent_table=torch.tensor([[1, 99]]).int()))


@pytest.mark.parametrize("known", [True, False], ids=["on the host", "on the device alone"])
@pytest.mark.parametrize("level", ["1", "2"])
def test_a_second_table_that_is_too_narrow_is_refused(level: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a first one is, by the layer too, which is given tables that `from_lengths` has not seen."""
    monkeypatch.setenv("PAGEDATTN_CHECK", level)
    step = mixed([40], [40])
    step = step if known else step.replace(seq_lens_cpu=None)
    call(step.replace(recent_table=torch.tensor([[1, 2]]).int()))
    if not known and level == "1":
        return  # nothing that waits for the device
    with pytest.raises(
        InvalidInputError, match="seq_lens must be at most 32, the width of recent_table x block size, got"
    ):
        call(step.replace(recent_table=torch.tensor([[1]]).int()))
    with pytest.raises(InvalidInputError, match="seq_lens must be at most 32"):
        call(step.replace(block_table=torch.tensor([[1]]).int()))
    with pytest.raises(
        InvalidInputError, match=r"seq_lens must be at most 1 blocks x 32 tokens, .* widen the recent table"
    ):
        tables = (torch.tensor([[1] * width]).int() for width in (2, 1))
        CommonAttentionMetadata.from_lengths([40], [40], next(tables), block_size=32, recent_table=next(tables))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, "block_size must be a multiple of 32 for kv_cache_dtype='int4', got 16"),
        ({"attn_type": AttentionType.CROSS}, "attn_type=cross .*decoder over int4"),
        ({"causal": False}, "causal=False .*causal attention over int4"),
        ({"mask": Mask(own_block=32)}, "own_block=32 .*none over int4"),
        ({"backend": "FLASHINFER"}, "kv_cache_dtype=int4"),
    ],
)
def test_layers_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedError), match=message):
        Attention(HEADS, DIM, KV_HEADS, kv_cache_dtype="int4", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "block_size must be a multiple of 32 .* got 48; pass block_size=64"),
        ({"block_size": 32}, "recent_blocks must be given for kv_cache_dtype='int4', got None"),
        ({"kv_cache_dtype": "int8", "recent_blocks": 3}, "recent_blocks must be None for kv_cache_dtype='int8'"),
    ],
)
def test_caches_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PagedKVCache(**{"num_layers": 1, "num_blocks": 4, "kv_cache_dtype": "int4", **options})


def test_layers_of_several_kinds_are_refused() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "block_size": 32, "kv_cache_dtype": "int4"}
    specs = [SlidingWindowSpec(**shape, sliding_window=width) for width in (8, 16)]
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int4' has one KV group, these layers are of 2"):
        PagedKVCache.from_specs(specs, 4, recent_blocks=2)
