"""What a layer refuses: at level 1 shapes, dtypes and devices by argument name, at level 2 contents, at 0 nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import (
    Attention,
    AttentionType,
    CommonAttentionMetadata,
    LayerCache,
    PagedKVCache,
    env,
    paged_attention,
    plan_step,
)
from pagedattn.cache.specs import MLASpec
from pagedattn.errors import InvalidInputError
from pagedattn.testing import interpreted

TABLE = torch.tensor([[1, 2], [3, -9]], dtype=torch.int32)


def call(layer: Attention | None = None, **changes: Any) -> torch.Tensor:
    layer = layer or Attention(4, 16, 2, block_size=16)
    arguments: dict[str, Any] = {
        "query": torch.randn(6, 4, 16),
        "key": torch.randn(6, 2, 16),
        "value": torch.randn(6, 2, 16),
        "kv_cache": cache(),
        "metadata": common(),
    }
    return layer(**{**arguments, **changes})


def cache(**changes: Any) -> LayerCache:
    sizes: dict[str, Any] = {"num_layers": 1, "num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_dim": 16}
    return PagedKVCache(**{**sizes, **changes}).layer(0)


def common(**changes: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths([1, 5], [20, 5], TABLE).replace(**changes)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _level_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDATTN_CHECK", raising=False)


META = torch.device("meta")
UNKNOWN = {"query_start_loc_cpu": None, "seq_lens_cpu": None}
BAD_CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no metadata": ({"metadata": None}, "metadata", "of plan_step or of build, or .*got NoneType"),
    "the whole cache": ({"kv_cache": PagedKVCache(1, 4)}, "kv_cache", "got PagedKVCache; pass cache.layer"),
    "query heads": ({"query": torch.randn(6, 5, 16)}, "query", r"\[T, 4, 16\], got \[6, 5, 16\]"),
    "query dim": ({"query": torch.randn(6, 4, 8)}, "query", r"\[T, 4, 16\]"),
    "query rank": ({"query": torch.randn(6, 63)}, "query", r"\[T, 4, 16\], got \[6, 63\]"),
    "query rows": ({"query": torch.randn(5, 4, 16)}, "query", "at least 6 rows, as the metadata says, got 5"),
    "query dtype": ({"query": torch.randn(6, 4, 16).half()}, "query", "torch.float32, got torch.float16; .*cast"),
    "query device": ({"query": torch.empty(6, 4, 16, device=META)}, "query", "on cpu as the metadata, got meta"),
    "query strides": ({"query": torch.randn(6, 4, 32)[..., ::2]}, "query", "contiguous in its last dimension"),
    "key heads": ({"key": torch.randn(6, 4, 16)}, "key", r"\[T, 2, 16\]"),
    "key dtype": ({"key": torch.randn(6, 2, 16).double()}, "key", "torch.float32, got torch.float64"),
    "key device": ({"key": torch.empty(6, 2, 16, device=META)}, "key", "on cpu"),
    "key rows": ({"key": torch.randn(5, 2, 16)}, "key", "at least 6 rows, one per slot"),
    "value dim": ({"value": torch.randn(6, 2, 8)}, "value", r"\[T, 2, 16\]"),
    "value strides": ({"value": torch.randn(6, 16, 2).mT}, "value", "contiguous in its last dimension"),
    "no keys": ({"key": None, "value": None, "kv_cache": None}, "key and value", "given where there is no kv_cache"),
    "cache heads": ({"kv_cache": cache(num_kv_heads=4)}, "kv_cache", r"\(2, 16\).*got \(\(4, 16\)"),
    "cache dim": ({"kv_cache": cache(head_dim_v=8)}, "kv_cache", r"\(2, 8\)"),
    "cache device": ({"kv_cache": cache(device="meta")}, "kv_cache", "on cpu as the metadata, got meta"),
    "cache dtype": ({"kv_cache": cache(dtype=torch.float16)}, "kv_cache", "torch.float32.*got torch.float16"),
    "cache blocks": ({"kv_cache": cache(block_size=8)}, "kv_cache", "blocks of 16 tokens, got 8; build the layer"),
    "blocks of the metadata": (
        *(
            {"metadata": common(block_size=32)},
            "metadata",
            "of blocks of 16 .*got 32; build it with block_size=16",
        ),
    ),
    "lengths": (
        {"metadata": common(seq_lens_cpu=i32(33, 5), max_seq_len=33)},
        "seq_lens",
        "at most 32, the table's width",
    ),
    "longest query": ({"metadata": common(max_query_len=1)}, "max_query_len", "at least 5, the longest, got 1"),
    "longest sequence": ({"metadata": common(max_seq_len=19)}, "max_seq_len", "at least 20, the longest, got 19"),
    "tokens": ({"metadata": common(num_tokens=5)}, "num_tokens", "at least 6, where the queries end, got 5"),
    "sequences": (
        {"metadata": common(num_seqs=1)},
        "query_start_loc_cpu",
        r"\[2\] for 1 sequences, or None, got \[3\]",
    ),
    "more sequences": (
        *(
            {"metadata": common(num_seqs=3, query_start_loc_cpu=None, seq_lens_cpu=None)},
            "num_seqs",
            "at most 2, .*got 3",
        ),
    ),
    "decodes": (
        {"metadata": common(num_decodes=2)},
        "num_decodes",
        "each, got 2, where sequence 1 has 5; pass 0, or sort",
    ),
    "too many decodes": ({"metadata": common(num_decodes=7)}, "num_decodes", r"in 0\.\.2, .*got 7"),
    "negative decodes": ({"metadata": common(num_decodes=-1)}, "num_decodes", r"in 0\.\.2, .*got -1"),
    "shared": ({"metadata": common(shared_prefix_len=6)}, "shared_prefix_len", r"in 0\.\.5, .*got 6"),
    "shared by less than none": ({"metadata": common(shared_prefix_len=-1)}, "shared_prefix_len", "got -1"),
    "out": ({"out": torch.empty(6, 4, 8)}, "out", r"\[T, Hq, Dv\]"),
    "out of another dtype": ({"out": torch.empty(6, 4, 16).half()}, "out", "in the query's dtype"),
}


@pytest.mark.parametrize("name", sorted(BAD_CALLS))
def test_a_wrong_argument_is_named(name: str) -> None:
    changes, param, match = BAD_CALLS[name]
    with pytest.raises(InvalidInputError, match=rf"^{param} must be .*{match}") as error:
        call(**changes)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["longest query", "longest sequence"])
def test_bounds_are_checked_when_a_step_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (changes, param, match), layer = BAD_CALLS[name], Attention(4, 16, 2, backend="TORCH")
    with pytest.raises(InvalidInputError, match=rf"^{param} must be .*{match}"):
        plan_step([layer], changes["metadata"])
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    plan_step([layer], changes["metadata"])


def test_the_right_call_is_served_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in "012":
        monkeypatch.setenv("PAGEDATTN_CHECK", level)
        assert call().isfinite().all()


BAD_CONTENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "block too high": ({"block_table": torch.tensor([[1, 4], [3, 0]])}, "block_table", "got 4 at row 0, column 1"),
    "block negative": ({"block_table": torch.tensor([[1, 2], [-1, 0]])}, "block_table", "got -1 at row 1, column 0"),
    "slot twice": ({"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 4])}, "slot_mapping", "each slot at most once"),
    "starts": ({"query_start_loc": i32(1, 1, 6)}, "query_start_loc", "0 at first"),
    "starts fall": ({"query_start_loc": i32(0, 7, 6)}, "query_start_loc", "never decreasing"),
    "short": ({"seq_lens": i32(20, 4)}, "seq_lens", "at least the new tokens"),
    "long": ({"seq_lens": i32(33, 5), "max_seq_len": 33}, "seq_lens", "at most 32, got 33"),
    "longest query": ({"max_query_len": 1, **UNKNOWN}, "max_query_len", "at least 5, the longest, got 1"),
    "longest sequence": ({"max_seq_len": 19, **UNKNOWN}, "max_seq_len", "at least 20, the longest, got 19"),
    "decodes": ({"num_decodes": 2, **UNKNOWN}, "num_decodes", "each, got 2, where sequence 1 has 5"),
    "shared": ({"shared_prefix_len": 5}, "shared_prefix_len", r"share \(5 are not\), got others at row 1; pass 0"),
    "shared and longer": (
        *({"shared_prefix_len": 6, "seq_lens_cpu": None}, "shared_prefix_len", r"in 0\.\.5, .*got 6"),
    ),
}


@pytest.mark.parametrize("name", sorted(BAD_CONTENTS))
def test_contents_are_checked_at_level_2_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, param, match = BAD_CONTENTS[name]
    changes = {field: value.int() if field == "block_table" else value for field, value in changes.items()}
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    with pytest.raises(InvalidInputError, match=rf"^{param} must be .*{match}") as error:
        call(metadata=common(**changes))
    assert error.value.param == param
    for level in "01":
        monkeypatch.setenv("PAGEDATTN_CHECK", level)
        assert call(metadata=common(**changes)).shape == (6, 4, 16)


def test_padding_decodes_nothing_where_nobody_else_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 0], [20, 0]
    assert call(metadata=CommonAttentionMetadata.from_lengths(*lengths, TABLE, num_decodes=2)).shape == (6, 4, 16)
    mixed = CommonAttentionMetadata.from_lengths([1, 0, 5], [20, 0, 5], TABLE[[0, 0, 1]]).replace(num_decodes=2)
    for level, unknown in (("1", dict[str, None]()), ("2", UNKNOWN)):
        monkeypatch.setenv("PAGEDATTN_CHECK", level)
        with pytest.raises(InvalidInputError, match=r"num_decodes must be at most 1, .*got 2, where sequence 1 has 0;"):
            call(metadata=mixed.replace(**unknown))


def test_a_prefix_in_the_same_blocks_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    table = torch.tensor([[1, 2], [1, 3], [-9, -9]], dtype=torch.int32)
    step = CommonAttentionMetadata.from_lengths([1, 5, 0], [20, 30, 0], table)
    for length in (0, 1, 16):
        assert call(metadata=step.replace(shared_prefix_len=length)).isfinite().all()
    for length in (17, 20):
        with pytest.raises(InvalidInputError, match=rf"\({length} are not\), got others at row 1"):
            call(metadata=step.replace(shared_prefix_len=length))
    nobody = CommonAttentionMetadata.from_lengths([0, 1], [0, 20], table[:2])
    with pytest.raises(InvalidInputError, match=r"in 0\.\.0"):
        call(metadata=nobody.replace(shared_prefix_len=1, seq_lens_cpu=None))


def test_level_0_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = common(seq_lens_cpu=i32(33, 5))
    with pytest.raises(InvalidInputError):
        call(metadata=wrong)
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    assert call(metadata=wrong).isfinite().all()


def test_garbage_after_a_sequence_is_no_fault_at_level_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    assert int(TABLE[1, 1]) < 0
    skipped = common(slot_mapping=torch.tensor([-1, -1, 2, 3, 64, 64]))  # of a cache of 64
    assert call(metadata=skipped).isfinite().all()


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "3")
    with pytest.raises(InvalidInputError, match="PAGEDATTN_CHECK must be one of 0, 1, 2, got '3'"):
        call()
    assert "PAGEDATTN_CHECK" in env.VARIABLES


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_one_value_per_head_is_needed(name: str) -> None:
    bad = torch.zeros(2)
    with pytest.raises(InvalidInputError, match=rf"{name} must be \[4\], one per query head, got \[2\]"):
        Attention(
            4, 16, 2, alibi_slopes=bad if name == "alibi_slopes" else None, sinks=bad if name == "sinks" else None
        )


def test_a_key_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="value"):
        call(value=None)


def test_a_value_without_a_key_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^key must be given with value, got None; pass neither"):
        call(key=None)
    rows = torch.randn(6, 4, 16)
    with pytest.raises(InvalidInputError, match=r"^key must be given with value"):
        paged_attention(rows, None, rows[:, :2], cache(), common())


def test_a_value_for_a_cache_whose_values_are_its_keys_is_refused() -> None:
    latent = PagedKVCache.from_specs([MLASpec(num_kv_heads=1, head_dim=24, latent_dim=16)], 4).layer(0)
    layer, rows = Attention(4, 24, 1, head_dim_v=16), torch.randn(6, 4, 24)
    with pytest.raises(InvalidInputError, match=r"^value must be None, as the cache's values are a view of its keys"):
        layer(rows, rows[:, :1], rows[:, :1, :16], latent, common())
    assert layer(rows, rows[:, :1], None, latent, common()).shape == (6, 4, 16)
    assert torch.equal(latent.key[2, 3], rows[0, :1])


def test_cross_attention_may_have_more_queries_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    cross = CommonAttentionMetadata.from_lengths([1, 5], [20, 3], TABLE)
    for causal in (True, False):
        with pytest.raises(InvalidInputError, match="seq_lens must be at least the new tokens"):
            call(Attention(4, 16, 2, causal=causal), metadata=cross)
    kept = call(Attention(4, 16, 2, attn_type=AttentionType.CROSS), key=None, value=None, metadata=cross)
    assert kept.isfinite().all()


def test_an_encoder_is_not_given_a_cache() -> None:
    with pytest.raises(InvalidInputError, match="kv_cache"):
        call(Attention(4, 16, 2, attn_type=AttentionType.ENCODER_ONLY))


def test_fewer_packed_keys_than_lengths_say_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(6, 4, 16)
    dense = CommonAttentionMetadata.from_lengths([1, 5], [20, 5])
    for level, known in (("1", dense), ("2", dense.replace(**UNKNOWN))):
        monkeypatch.setenv("PAGEDATTN_CHECK", level)
        with pytest.raises(InvalidInputError, match=r"^key and value must be at least 25 rows, .*got 6"):
            Attention(4, 16)(rows, rows, rows, None, known)


SERVES_CPU = pytest.param(
    "TRITON", marks=pytest.mark.skipif(not interpreted(), reason="TRITON serves the CPU only when interpreted")
)


@pytest.mark.parametrize("backend", ["TORCH", SERVES_CPU])
def test_a_block_outside_the_cache_is_skipped_not_read_from_block_0(backend: str) -> None:
    layer, layer_cache = Attention(4, 16, 2, backend=backend), cache()
    layer_cache.value.fill_(1.0)
    layer_cache.value[0] = 7.0
    if backend == "TORCH":  # TRITON gives block 0's values no weight, but NaN times no weight is NaN
        layer_cache.key[0] = layer_cache.value[0] = torch.nan
    table = torch.tensor([[-1, 1, 2, 3]], dtype=torch.int32)
    step = CommonAttentionMetadata.from_lengths([1], [64], table).replace(seq_lens_cpu=None)
    out = layer(torch.randn(1, 4, 16), None, None, layer_cache, step)
    assert torch.allclose(out, torch.ones(1, 4, 16))


@pytest.mark.parametrize("backend", ["TORCH", SERVES_CPU])
def test_a_table_is_not_read_past_its_width(backend: str) -> None:
    layer, layer_cache = Attention(4, 16, 2, backend=backend), cache()
    layer_cache.value.copy_(torch.arange(4.0)[:, None, None, None].expand(4, 16, 2, 16))
    wide = torch.tensor([[1, 3]], dtype=torch.int32)
    step = CommonAttentionMetadata.from_lengths([1], [32], wide).replace(seq_lens_cpu=None, block_table=wide[:, :1])
    out = layer(torch.zeros(1, 4, 16), None, None, layer_cache, step)
    assert torch.allclose(out, torch.ones(1, 4, 16))


@pytest.mark.parametrize("backend", ["TORCH", SERVES_CPU])
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 1), (1, 20), (1, 48), (17, 20), (17, 48)])
def test_nan_in_a_block_nobody_holds_reaches_no_output(backend: str, rows: int, seq_len: int) -> None:
    layer, layer_cache = Attention(4, 16, 2, backend=backend), cache()
    layer_cache.value.fill_(1.0)
    layer_cache.key[0] = layer_cache.value[0] = torch.nan
    table = torch.tensor([[1, 2, 3, 0]], dtype=torch.int32)
    step = CommonAttentionMetadata.from_lengths([rows], [seq_len], table)
    out = layer(torch.randn(rows, 4, 16), None, None, layer_cache, step)
    assert torch.allclose(out, torch.ones(rows, 4, 16))
