"""vLLM's backend over steps as vLLM makes them: the real base classes where vLLM can be imported, else stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_steps import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    SHAPES,
    TOLERANCE,
    attend,
    make_builder,
    make_cache,
    make_common,
    make_layer,
)

from pagedattn.errors import UnsupportedError
from pagedattn.formats.int8.format import ROWS as INT8
from pagedattn.integrations.vllm.impl import views
from pagedattn.integrations.vllm.kernels import int8_row_bytes
from pagedattn.integrations.vllm.step import leading_decodes

# New tokens and keys before them, of steps in a row; decodes come first.
STEPS = [([5, 20, 33], [0, 0, 0]), ([1, 1, 7], [5, 20, 33]), ([1, 1, 1], [6, 21, 40])]
SINKS, SLOPES = torch.tensor([0.5, -1.0, 2.0, 0.0]), [0.1, 0.2, 0.3, 0.4]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": 9}),
    "softcap": ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "alibi": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
}
PLACES = [(shape, layout, pad) for shape in SHAPES for layout in ("NHD", "HND") for pad in (0, 64)]


class Conversations:
    """The keys and values that each sequence of a layer has seen."""

    def __init__(self, count: int) -> None:
        empty = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)
        self.seen = [(empty, empty)] * count

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        query_lens: list[int],
        **mask: Any,
    ) -> None:
        """Append a step's new rows, and compare its output with the definition."""
        at = 0
        for b, count in enumerate(query_lens):
            part = slice(at, at + count)
            keys, values = (torch.cat([old, new[part]]) for old, new in zip(self.seen[b], (key, value), strict=True))
            self.seen[b] = keys, values
            torch.testing.assert_close(output[part], attend(query[part], keys, values, **mask), **TOLERANCE)
            at += count


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(count, NUM_HEADS, HEAD_DIM),
        torch.randn(count, NUM_KV_HEADS, HEAD_DIM),
        torch.randn(count, NUM_KV_HEADS, HEAD_DIM),
    )


def distinct_blocks(count: int, width: int) -> torch.Tensor:
    """A shuffled block table without block 0, which is vLLM's null block."""
    return torch.randperm(NUM_BLOCKS - 1)[: count * width].reshape(count, width).int() + 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("shape", "layout", "pad"), PLACES)
def test_prompts_a_mixed_step_and_decodes(case: str, shape: str, layout: str, pad: int) -> None:
    torch.manual_seed(0)
    options, mask = CASES[case]
    layers = {name: make_layer(**options) for name in "ab"}
    caches = {name: make_cache(shape, layout, pad) for name in layers}
    builder, table = make_builder(layers), distinct_blocks(3, 5)
    seen = {name: Conversations(3) for name in layers}
    for query_lens, before in STEPS:
        seq_lens = [q + k for q, k in zip(query_lens, before, strict=True)]
        metadata = builder.build(0, make_common(query_lens, seq_lens, table))
        assert len(metadata.step.by_key) == 1
        for name, layer in layers.items():
            query, key, value = rows_of(sum(query_lens) + 3)  # padding of a piecewise graph
            output = torch.full_like(query, 7.0)
            assert layer.impl.forward(layer, query, key, value, caches[name], metadata, output) is output
            seen[name].check(query, key, value, output, query_lens, **mask)
    assert all(not cache[0].any() for cache in caches.values()), "the null block was written"


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_of_a_full_graph_gets_what_was_captured(tokens: int) -> None:
    torch.manual_seed(1)
    layers, cache = {"a": make_layer(), "b": make_layer(sliding_window=9)}, make_cache()
    builder, table = make_builder(layers), distinct_blocks(3, 5)
    room = make_common([tokens] * 4, [tokens] * 4, torch.zeros(4, 5, dtype=torch.int32), max_seq_len=80)
    captured = builder.build_for_cudagraph_capture(room)
    assert captured is builder.build_for_cudagraph_capture(room) and len(captured.step.by_key) == 2
    seen, lens = Conversations(3), [11, 20, 40]
    first = make_common(lens, lens, table)
    query, key, value = rows_of(sum(lens))
    metadata = builder.build(0, first)
    layers["a"].impl.forward(layers["a"], query, key, value, cache, metadata, output := torch.empty_like(query))
    seen.check(query, key, value, output, lens)
    for _ in range(3):
        lens = [one + tokens for one in lens]
        step = make_common([tokens] * 3, lens, table, pad_seqs=1, pad_tokens=tokens)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(room, name).copy_(getattr(step, name))  # as a runner rewrites its persistent tensors
        room.query_start_loc_cpu = step.query_start_loc_cpu
        room.max_seq_len = max(lens)
        assert builder.build(0, room) is captured
        query, key, value = rows_of(4 * tokens)
        layers["a"].impl.forward(layers["a"], query, key, value, cache, captured, output := torch.zeros_like(query))
        seen.check(query, key, value, output, [tokens] * 3)
    assert not cache[0].any()


def test_a_step_that_is_not_uniform_is_planned_for_itself() -> None:
    builder, table = make_builder({"a": make_layer()}), distinct_blocks(3, 5)
    common = make_common([2, 2, 2], [9, 9, 9], table)
    captured = builder.build_for_cudagraph_capture(common)
    common.max_query_len = 4  # as many sequences and tokens: 1, 1 and 4 new ones
    common.query_start_loc_cpu = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    assert builder.build(0, common) is not captured


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_of_8_bits_is_bytes_under_vllms_scales(name: str, dtype: torch.dtype, shape: str) -> None:
    torch.manual_seed(2)
    layer, cache = make_layer(kv_cache_dtype=name, scale=0.5), make_cache(shape, dtype=torch.uint8)
    metadata = make_builder({"a": layer}).build(0, make_common([20], [20], torch.tensor([[1, 2]], dtype=torch.int32)))
    query, key, value = rows_of(20)
    output = layer.impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))
    keys, values = ((x / 0.5).to(dtype).float() * 0.5 for x in (key, value))
    torch.testing.assert_close(output, attend(query, keys, values), atol=1e-4, rtol=1e-3)
    wrong = attend(query, key, value)
    assert (output - wrong).abs().max() > 1e-3, "nothing was rounded"


@pytest.mark.parametrize(("layout", "pad"), [("NHD", 0), ("HND", 0), ("NHD", 64)])
def test_an_int8_cache_has_the_scales_of_a_row_behind_its_codes(layout: str, pad: int) -> None:
    torch.manual_seed(3)
    layer = make_layer(kv_cache_dtype="int8_per_token_head", scale=0.5)  # vLLM's scales are not those of rows
    cache = make_cache("packed", layout, pad, torch.int8, row=int8_row_bytes(HEAD_DIM))
    assert all(step % 16 == 0 for step in cache.stride()[:-1])
    builder, table, seen = make_builder({"a": layer}), distinct_blocks(3, 5), Conversations(3)
    for query_lens, before in STEPS:
        seq_lens = [q + k for q, k in zip(query_lens, before, strict=True)]
        metadata = builder.build(0, make_common(query_lens, seq_lens, table))
        query, key, value = rows_of(sum(query_lens))
        value *= 3
        output = layer.impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))
        seen.check(query, as_int8(key), as_int8(value), output, query_lens)
    assert not cache[0].any(), "the null block was written"


def as_int8(rows: torch.Tensor) -> torch.Tensor:
    return INT8.decode(INT8.encode(rows), HEAD_DIM, torch.float32)


def test_a_layer_that_shares_a_cache_writes_nothing_and_a_profiling_run_gives_zeros() -> None:
    layer, cache = make_layer(kv_sharing_target_layer_name="a"), make_cache()
    metadata = make_builder({"b": layer}).build(0, make_common([3], [3], torch.tensor([[1]], dtype=torch.int32)))
    query, key, value = rows_of(3)
    layer.impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))
    assert not cache.any()
    empty = torch.tensor([])
    assert not layer.impl.forward(layer, query, key, value, empty, None, torch.ones_like(query)).any()


def test_layers_of_an_encoder_need_no_cache() -> None:
    torch.manual_seed(3)
    layer = make_layer(attn_type="encoder_only")
    common = make_common([4, 3], [4, 3], torch.zeros(2, 1, dtype=torch.int32), causal=False)
    metadata = make_builder({"a": layer}).build(0, common)
    query, key, value = rows_of(9)
    output = layer.impl.forward(layer, query, key, value, torch.tensor([]), metadata, torch.full_like(query, 7.0))
    for part in (slice(0, 4), slice(4, 7)):
        torch.testing.assert_close(output[part], attend(query[part], key[part], value[part], causal=False), **TOLERANCE)
    assert bool((output[7:] == 7).all())


def test_slots_that_a_wrapper_sets_are_those_that_are_written() -> None:
    """Cross attention: as many keys as the encoder has, written where its own slots say, at the first step alone."""
    torch.manual_seed(4)
    layer, cache = make_layer(attn_type="encoder_decoder"), make_cache()
    table, lens = torch.tensor([[3, 1], [5, 2]], dtype=torch.int32), [20, 7]
    _, key, value = rows_of(27)
    for first in (True, False):
        common = make_common([3, 2], lens, table, causal=False)
        common.slot_mapping = torch.full((5,), -1)  # of the decoder, which cross attention does not write by
        metadata = make_builder({"a": layer}).build(0, common)
        whole = [(b, p) for b, count in enumerate(lens) for p in range(count)] if first else []
        slots = [int(table[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for b, p in whole]
        metadata.slot_mapping = torch.tensor(slots, dtype=torch.int64)
        query, given = torch.randn(5, NUM_HEADS, HEAD_DIM), (key, value) if first else (None, None)
        output = layer.impl.forward(layer, query, *given, cache, metadata, torch.empty_like(query))
        for rows, keys in ((slice(0, 3), slice(0, 20)), (slice(3, 5), slice(20, 27))):
            wanted = attend(query[rows], key[keys], value[keys], causal=False)
            torch.testing.assert_close(output[rows], wanted, **TOLERANCE)


def test_decodes_are_those_in_front() -> None:
    starts = ([0, 1, 2, 9], [0, 5, 6], [0, 1, 2], [0, 1, 1])
    assert [leading_decodes(torch.tensor(x).numpy()) for x in starts] == [2, 0, 2, 1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_views_name_the_same_elements_in_both_shapes(layout: str) -> None:
    for shape in SHAPES:
        cache = make_cache(shape, layout, pad=32)
        layer = views(cache, HEAD_DIM)
        assert layer.key.shape == layer.value.shape == (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        layer.key[3, 5, 1] = 1.0
        layer.value[3, 5, 1] = 2.0
        found = cache[3, :, 5, 1] if shape == "pair" else cache[3, 1, 5].unflatten(0, (2, HEAD_DIM))
        assert found[0].eq(1).all() and found[1].eq(2).all() and cache.ne(0).sum() == 2 * HEAD_DIM


def test_a_layer_may_be_built_under_the_meta_device() -> None:
    with torch.device("meta"):
        layer = make_layer()
    assert layer.impl.attention.spec.device_type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="chunk_lookback"):
        make_layer(chunk_lookback=3)
    make_layer(use_alibi_sqrt=False)
    common = make_common([1], [1], torch.ones(1, 1, dtype=torch.int32), causal=torch.ones(1, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="causal and other sequences"):
        make_builder({"a": make_layer()}).build(0, common)
    layer, query = make_layer(), torch.zeros(1, NUM_HEADS, HEAD_DIM)
    metadata = make_builder({"a": layer}).build(0, make_common([1], [1], torch.ones(1, 1, dtype=torch.int32)))
    with pytest.raises(UnsupportedError, match="quantised output"):
        layer.impl.forward(layer, query, None, None, make_cache(), metadata, query, output_scale=torch.ones(1))
