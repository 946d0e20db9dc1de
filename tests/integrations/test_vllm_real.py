"""The real vLLM's layers, wrappers and second model runner over our backend, on a CPU (make vllm-test)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm_real
from vllm_real import Model, Tensors, select_ours
from vllm_steps import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOLERANCE,
    attend,
    make_builder,
    make_cache,
    make_common,
    make_layer,
)

vllm_real.release()

from test_vllm_steps import Conversations, as_int8, rows_of  # noqa: E402
from vllm.model_executor.layers.attention import (  # noqa: E402
    ChunkedLocalAttention,
    CrossAttention,
    EncoderOnlyAttention,
)
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402

from pagedattn.integrations.vllm.backend import PagedAttentionBackend  # noqa: E402


@pytest.fixture(autouse=True)
def _selected(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield from select_ours(monkeypatch)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("manager_block", "pad", "across_layers"), [(16, 0, False), (16, 512, False), (48, 0, False), (16, 0, True)]
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_of_one_group_in_steps_of_the_second_runner(
    manager_block: int, pad: int, across_layers: bool, layout: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are padded, split into the kernel's blocks or hold all layers; chunks, then a captured full graph."""
    torch.manual_seed(0)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    names = "model.layers.0.attn", "model.layers.1.attn"
    model = Model({name: (None, {}) for name in names}, manager_block, layout, across_layers)
    model.allocate(10, pad)
    assert model.kernel_sizes == [BLOCK_SIZE] and len(model.groups[0]) == 1
    builder = model.groups[0][0].get_metadata_builder()
    assert builder.block_size == BLOCK_SIZE and len(builder._attention) == 1
    blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    tensors = Tensors(model, blocks, manager_block)
    captured = tensors.step([tokens] * 3, [tokens] * 3, capture=True)[0]
    seen = {name: Conversations(2) for name in model.layers}
    steps = [([5, 3], [5, 3]), ([1, 30], [6, 33])] + [([tokens] * 2, [6 + tokens * i, 33 + tokens * i]) for i in (1, 2)]
    for at, (query_lens, seq_lens) in enumerate(steps):
        metadata, rows = tensors.step(query_lens, seq_lens, pad_seqs=int(at > 1))
        assert all((metadata[name] is captured[name]) == (at > 1) for name in names)
        for name in names:
            query, key, value = rows_of(rows)
            output = model.forward(name, metadata, query, key, value)
            seen[name].check(query, key, value, output, query_lens)
    elements = NUM_KV_HEADS * 2 * BLOCK_SIZE * HEAD_DIM
    for cache in model.caches.values():
        assert not cache[: manager_block // BLOCK_SIZE].any(), "the null block was written"
        assert cache.stride(0) == (2 * elements if across_layers else elements + pad // 4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("manager_block", "pad"), [(16, 0), (16, 512), (48, 0)])
def test_int8_caches_have_rows_as_the_backend_lays_them_out(manager_block: int, pad: int, layout: str) -> None:
    if not vllm_real.caches_are_packed():
        assert "int8_per_token_head" not in PagedAttentionBackend.supported_kv_cache_dtypes
        pytest.skip("this release does not ask a backend how rows lie")
    assert "int8_per_token_head" in PagedAttentionBackend.supported_kv_cache_dtypes
    torch.manual_seed(8)
    name = "model.layers.0.attn"
    model = Model({name: (None, {})}, manager_block, layout, kv_cache_dtype="int8_per_token_head")
    model.allocate(10, pad)
    (cache,) = model.caches.values()
    parts = manager_block // BLOCK_SIZE
    assert cache.dtype == torch.int8 and cache.shape == (10 * parts, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM + 16)
    blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    tensors, seen = Tensors(model, blocks, manager_block), Conversations(2)
    for query_lens, seq_lens in (([5, 3], [5, 3]), ([1, 30], [6, 33]), ([1, 1], [7, 34])):
        metadata, rows = tensors.step(query_lens, seq_lens)
        query, key, value = rows_of(rows)
        output = model.forward(name, metadata, query, key, value)
        seen.check(query, as_int8(key), as_int8(value), output, query_lens)
    assert not cache[:parts].any(), "the null block was written"


@pytest.mark.parametrize(("served", "support"), [("TORCH", "NEVER"), ("TRITON", "UNIFORM_BATCH")])
def test_what_is_captured_depends_on_who_serves(served: str, support: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", served)
    model = Model({"a.0": (None, {})})
    model.allocate(4)
    assert model.support.min_cg_support is AttentionCGSupport[support]


@pytest.mark.parametrize("served", ["TORCH", "TRITON"])
@pytest.mark.parametrize("queries", [1, 20])
def test_blocks_below_a_window_are_not_read(served: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM frees them and puts block 0 in their place: NaN there, and in the freed blocks, must not reach an output."""
    if served == "TRITON":
        pytest.importorskip("triton")
    monkeypatch.setenv("PAGEDATTN_BACKEND", served)
    torch.manual_seed(1)
    model = Model({"a.0": (None, {"per_layer_sliding_window": 9})})
    model.allocate(8)
    (name,) = model.layers
    blocks, length = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32), 55
    seen = Conversations(1)
    query, key, value = rows_of(length)
    step = make_common([length], [length], blocks)
    model.forward(name, model.metadata(step, [blocks], [step.slot_mapping]), query, key, value)
    seen.seen = [(key, value)]
    step = make_common([queries], [length + queries], blocks)
    first = length - 8  # the first key that the first query sees
    masked = blocks.masked_fill(torch.arange(5) < first // BLOCK_SIZE, 0)
    assert masked.tolist() == [[0, 0, 3, 4, 5]]
    model.caches[name][:3] = torch.nan
    query, key, value = rows_of(queries)
    output = model.forward(name, model.metadata(step, [masked], [step.slot_mapping]), query, key, value)
    seen.check(query, key, value, output, [queries], window=9)


def test_a_group_for_each_window() -> None:
    """As vLLM's hybrid cache manager does: each group has tables, slots and a builder of its own."""
    torch.manual_seed(2)
    model = Model({"a.0": (None, {}), "a.1": (None, {"per_layer_sliding_window": 9})})
    model.allocate(8)
    assert len(model.groups) == 2 and model.kernel_sizes == [BLOCK_SIZE] * 2
    tables = [torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([[6, 4, 5]], dtype=torch.int32)]
    seen = {name: Conversations(1) for name in model.layers}
    for count, length in ((30, 30), (1, 31), (4, 35)):
        steps = [make_common([count], [length], table) for table in tables]
        metadata = model.metadata(steps[0], tables, [step.slot_mapping for step in steps])
        for name, window in (("a.0", None), ("a.1", 9)):
            query, key, value = rows_of(count)
            output = model.forward(name, metadata, query, key, value)
            seen[name].check(query, key, value, output, [count], window=window)


def test_a_profiling_run_and_a_layer_that_shares_a_cache() -> None:
    torch.manual_seed(3)
    model = Model({"a.0": (None, {}), "a.1": (None, {"kv_sharing_target_layer_name": "a.0"})})
    query, key, value = rows_of(4)
    assert not model.forward("a.0", None, query, key, value).any()
    model.allocate(4)
    assert model.caches["a.1"] is model.caches["a.0"] and model.groups[0][0].layer_names == ["a.0", "a.1"]
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    step = make_common([20], [20], table)
    metadata = model.metadata(step, [table], [step.slot_mapping])
    for name in model.layers:
        query, new, more = rows_of(20)
        if name == "a.0":
            key, value = new, more
        output = model.forward(name, metadata, query, new, more)
        torch.testing.assert_close(output, attend(query, key, value), **TOLERANCE)


def test_cross_attention_writes_once_and_reads_the_encoders_length() -> None:
    torch.manual_seed(4)
    model = Model({"a.0": (CrossAttention, {"attn_type": "encoder_decoder"})})
    model.allocate(8)
    table, lens = torch.tensor([[3, 1], [5, 2]], dtype=torch.int32), [20, 7]
    _, key, value = rows_of(27)
    for before in (0, 4):
        count = [3, 2] if before == 0 else [1, 1]
        step = make_common(count, [before + n for n in count], table).replace(
            encoder_seq_lens=torch.tensor(lens, dtype=torch.int32),
            encoder_seq_lens_cpu=torch.tensor(lens).numpy(),
            seq_lens_cpu_upper_bound=torch.tensor([before + n for n in count], dtype=torch.int32),
        )
        metadata = model.metadata(step, [table], [step.slot_mapping])
        query, given = torch.randn(sum(count), NUM_HEADS, HEAD_DIM), (None, None) if before else (key, value)
        output = model.forward("a.0", metadata, query, *given)
        for rows, keys in ((slice(0, count[0]), slice(0, 20)), (slice(count[0], None), slice(20, 27))):
            wanted = attend(query[rows], key[keys], value[keys], causal=False)
            torch.testing.assert_close(output[rows], wanted, **TOLERANCE)
    assert not model.caches["a.0"][0].any()


def test_encoder_only_attention_sees_all_of_its_own_sequence() -> None:
    torch.manual_seed(5)
    model = Model({"a.0": (EncoderOnlyAttention, {})})
    layer = model.layers["a.0"]
    assert layer.get_kv_cache_spec(model.config) is None
    builder = make_builder({"a.0": layer}, layer.get_attn_backend().get_builder_cls())
    step = make_common([4, 3], [4, 3], torch.zeros(2, 1, dtype=torch.int32))
    query, key, value = rows_of(9)  # with padding of a piecewise graph
    output = model.forward("a.0", {"a.0": builder.build(0, step)}, query, key, value)
    for part in (slice(0, 4), slice(4, 7)):
        torch.testing.assert_close(output[part], attend(query[part], key[part], value[part], causal=False), **TOLERANCE)


def test_chunked_local_attention_sees_its_own_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    chunk = 32
    model = Model({"a.0": (ChunkedLocalAttention, {"attention_chunk_size": chunk})})
    model.allocate(16)
    assert model.support.min_cg_support is AttentionCGSupport.NEVER
    table = (torch.randperm(15)[:10] + 1).int().reshape(2, 5)
    seen = [(torch.empty(0, NUM_KV_HEADS, HEAD_DIM),) * 2] * 2
    for query_lens, seq_lens in (([40, 3], [40, 3]), ([25, 1], [65, 4]), ([1, 1], [66, 5])):
        step = make_common(query_lens, seq_lens, table)
        query, key, value = rows_of(sum(query_lens))
        output = model.forward("a.0", model.metadata(step, [table], [step.slot_mapping]), query, key, value)
        at = 0
        for b, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            new = slice(at, at + count)
            keys, values = seen[b] = torch.cat([seen[b][0], key[new]]), torch.cat([seen[b][1], value[new]])
            for row, position in enumerate(range(length - count, length), start=at):
                part = slice(position // chunk * chunk, position + 1)
                wanted = attend(query[row : row + 1], keys[part], values[part])
                torch.testing.assert_close(output[row : row + 1], wanted, **TOLERANCE)
            at += count


def test_fast_prefill_copies_the_fields_of_a_steps_metadata() -> None:
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    torch.manual_seed(7)
    wrapped = create_fast_prefill_custom_backend("FastPrefill", PagedAttentionBackend)
    layer, writer, cache = make_layer(kv_sharing_target_layer_name="b"), make_layer(), make_cache()
    table = torch.tensor([[3, 1], [5, 2]], dtype=torch.int32)
    step = make_common([20, 7], [20, 7], table)
    query, key, value = rows_of(27)
    metadata = make_builder({"b": writer}).build(0, step)
    writer.impl.forward(writer, query, key, value, cache, metadata, torch.empty_like(query))
    last = torch.tensor([19, 26])
    step.logits_indices_padded, step.num_logits_indices = last, 2
    if hasattr(step, "max_logits_per_req"):
        step.max_logits_per_req = 1
    metadata = make_builder({"a": layer}, wrapped.get_builder_cls()).build(0, step)
    assert type(metadata).__name__ == "KVSharingFastPrefillAttentionMetadata"
    query = torch.randn(2, NUM_HEADS, HEAD_DIM)
    output = layer.impl.forward(layer, query, key[last], value[last], cache, metadata, torch.empty_like(query))
    for i, part in enumerate((slice(0, 20), slice(20, 27))):
        torch.testing.assert_close(output[i : i + 1], attend(query[i : i + 1], key[part], value[part]), **TOLERANCE)
