"""Cache formats: what their torch halves store, what a layer says of another format's cache, what is compiled anew."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from format_rows import device_of, normal

from pagedattn import Attention, CommonAttentionMetadata, LayerCache, PagedKVCache, ops
from pagedattn.cache.specs import FullAttentionSpec, SlidingWindowSpec, group_layers
from pagedattn.errors import InvalidInputError, PagedAttnError, UnsupportedError
from pagedattn.formats.base import RowKernels
from pagedattn.formats.int8.format import INT8, to_four_bits
from pagedattn.formats.registry import FORMATS, format_of, stored_as

SHAPE: dict[str, Any] = {"num_layers": 1, "num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}


def test_int8_is_the_nearest_code_of_steps_that_reach_the_largest() -> None:
    rows = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)) * 10
    rows[2, 1] = 0.0
    codes, scales = INT8.key.encode(rows)
    assert codes.dtype == torch.int8 and scales.shape == (5, 3, 1)
    for row, code, scale in zip(rows.flatten(0, 1), codes.flatten(0, 1), scales.flatten(), strict=True):
        largest = max(abs(float(x)) for x in row)
        assert 8 <= 16 * math.frexp(float(scale))[0] == int(16 * math.frexp(float(scale))[0]), "four significant bits"
        assert 1 - 1e-6 <= 127 * float(scale) / largest < 9 / 8 if largest else float(scale) == 1.0
        assert all(
            abs(float(x) - int(c) * float(scale)) <= 0.5001 * float(scale) for x, c in zip(row, code, strict=True)
        )
        assert 112 <= max(abs(int(c)) for c in code) <= 127 if largest else not code.any()
    decoded = INT8.key.decode((codes, scales), 16, torch.float64)
    assert torch.equal(decoded, codes.double() * scales.double()) and not decoded[2, 1].any()
    assert torch.equal(decoded, decoded.half().double()), "no bit more than float16 has"


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF])
def test_int8_rows_with_nan_stay_nan(bits: int) -> None:
    """With the bits that a CPU makes, and those that a GPU makes."""
    scales = torch.tensor([0x3F800001, bits], dtype=torch.int32).view(torch.float32)
    assert to_four_bits(scales).isnan().tolist() == [False, True] and float(to_four_bits(scales)[0]) == 1.125
    rows = torch.ones(2, 1, 8)
    rows[1, 0, 3] = torch.nan
    assert INT8.key.encode(rows)[1].flatten().isnan().tolist() == [False, True]


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_int8_rows_are_written_with_their_scales(path: str, block_size: int) -> None:
    device = device_of(path)
    cache = PagedKVCache(
        1, 16 // block_size, block_size, 2, 12, head_dim_v=20, device=device, kv_cache_dtype="int8"
    ).layer(0)
    key, value = (normal(5, 2, dim, seed=dim).to(device) for dim in (12, 20))
    key[1, 0] = value[3, 1] = 0.0
    slots = torch.tensor([7, 2, -1, 15, 16], device=device)
    ops.reshape_and_cache(key, value, cache.key, cache.value, slots, path=path, **cache.stored)
    for rows, codes, scales in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
        assert scales is not None
        want_codes, want_scales = torch.zeros_like(codes.flatten(0, 1)), torch.zeros_like(scales.flatten(0, 1))
        want_codes[slots[[0, 1, 3]]], want_scales[slots[[0, 1, 3]]] = (x[[0, 1, 3]] for x in INT8.key.encode(rows))
        assert torch.equal(codes.flatten(0, 1), want_codes) and torch.equal(scales.flatten(0, 1), want_scales)


def test_names_and_dtypes_name_formats() -> None:
    assert (
        format_of("fp8")
        is format_of("fp8_e4m3")
        is stored_as(None, torch.float8_e4m3fn)
        is stored_as("auto", torch.float8_e4m3fn)
    )
    assert stored_as(None, torch.bfloat16) is FORMATS["auto"] and stored_as("int8", torch.int8) is INT8
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype must be one of auto, .*int8.*got 'int3'"):
        format_of("int3")


def test_triton_tells_formats_apart_by_their_source() -> None:
    """A compiled kernel on disk is found by this: by names alone, it would be one of an older source."""
    keys = set()
    for changed in range(5):
        functions = [SimpleNamespace(cache_key=f"{at}{'!' if at == changed else ''}", fn=set_up) for at in range(4)]
        keys.add(RowKernels(*functions).cache_key)
    assert len(keys) == 5 and RowKernels(*functions[:2]).cache_key not in keys


def set_up() -> None:
    """In place of what a format's jitted functions are made of."""


def test_constants_of_kernels_can_be_written_as_json() -> None:
    """As Triton does for a hook on compilation, which vLLM sets once it serves."""
    for form in FORMATS.values():
        for side in (form.key, form.value):
            assert "write_" in json.loads(json.dumps(side.kernels)) and side.kernels.load_tile is not None


def test_a_cache_of_other_planes_has_another_layout() -> None:
    cache, other = (PagedKVCache(**SHAPE, kv_cache_dtype="int8").layer(0) for _ in range(2))
    assert cache.key_scale is not None
    apart = torch.zeros(4, 4, 2, 2)[..., :1]
    assert cache.layout is other.layout
    for changed in (
        LayerCache(cache.key, cache.value, cache.key_scale, apart, cache.format),
        LayerCache(cache.key, cache.value, apart, cache.value_scale, cache.format),
        LayerCache(cache.key, cache.value),
        LayerCache(cache.key, cache.value, cache.key_scale, cache.value_scale, "another"),
    ):
        assert changed.layout is not cache.layout


@pytest.mark.parametrize(
    ("layer", "cache", "match"),
    [
        ("int8", "auto", "int8"),
        ("auto", "int8", "'auto', got 'int8'"),
        ("k8v4", "int8", "'k8v4', got 'int8'"),
        ("fp8", "fp8_e5m2", "'fp8_e4m3', got 'fp8_e5m2'"),
    ],
)
def test_a_layer_and_its_cache_have_one_format(layer: str, cache: str, match: str) -> None:
    attention = Attention(4, 8, 2, kv_cache_dtype=layer, block_size=4)
    common = CommonAttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1).int(), block_size=4)
    new, other = torch.zeros(1, 2, 8), PagedKVCache(**SHAPE, kv_cache_dtype=cache).layer(0)
    with pytest.raises(InvalidInputError, match=rf"kv_cache .*{match}.*one kv_cache_dtype"):
        attention(torch.zeros(1, 4, 8), new, new, other, attention.build(common))


def test_scales_of_its_own_are_part_of_an_int8_cache() -> None:
    attention = Attention(4, 8, 2, kv_cache_dtype="int8", block_size=4)
    common = CommonAttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1).int(), block_size=4)
    cache, new = PagedKVCache(**SHAPE, kv_cache_dtype="int8").layer(0), torch.zeros(1, 2, 8)
    bare = LayerCache(cache.key, cache.value, format="int8")
    unnamed = LayerCache(cache.key, cache.value, cache.key_scale, cache.value_scale)
    for other, match in ((bare, "key_scale"), (unnamed, "of kv_cache_dtype='int8', got 'auto', as its dtype says")):
        with pytest.raises(InvalidInputError, match=match):
            attention(torch.zeros(1, 4, 8), new, new, other, attention.build(common))
    with pytest.raises(InvalidInputError, match="k_scale, v_scale, kv_scale must be given for fp8"):
        Attention(4, 8, 2, kv_cache_dtype="int8", k_scale=0.5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"k_scale_cache": None}, "k_scale_cache"),
        ({"v_scale_cache": torch.zeros(4, 4, 2, 1).half()}, "v_scale_cache"),
        ({"v_scale_cache": torch.zeros(3, 4, 2, 1)}, "v_scale_cache"),
        ({"k_scale_cache": torch.zeros(4, 1, 2, 1)}, "k_scale_cache"),
        ({"k_scale_cache": torch.zeros(4, 4, 1, 1)}, "k_scale_cache"),
        ({"kv_cache_dtype": "auto"}, "key"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "key"),
    ],
)
def test_ops_refuse_planes_of_another_format(path: str, changes: dict[str, Any], name: str) -> None:
    cache = PagedKVCache(**SHAPE, kv_cache_dtype="int8").layer(0)
    stored, rows, tables = {**cache.stored, **changes}, torch.zeros(1, 2, 8), torch.zeros(1, 1).int()
    lens, lengths = (torch.tensor([0, 1]).int(), torch.tensor([1]).int()), {"max_query_len": 1, "max_seq_len": 1}
    with pytest.raises(PagedAttnError, match=name):
        ops.reshape_and_cache(rows, rows, cache.key, cache.value, torch.zeros(1).long(), path=path, **stored)
    with pytest.raises(PagedAttnError, match=name):
        ops.paged_attention(
            torch.zeros(1, 4, 8), cache.key, cache.value, tables, *lens, scale=1.0, path=path, **lengths, **stored
        )


def test_sealing_leaves_formats_without_it_alone() -> None:
    cache = PagedKVCache(**SHAPE, kv_cache_dtype="int8")
    cache.slabs.random_(generator=torch.Generator().manual_seed(0))
    before = cache.slabs.clone()
    cache.seal_blocks([1, 2])
    assert torch.equal(cache.slabs, before) and not any(
        side.seals for one in FORMATS.values() for side in (one.key, one.value)
    )


def test_blocks_with_aligned_planes_are_overlaid_where_their_bytes_are_equal() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 6, "kv_cache_dtype": "int8"}
    narrow = SlidingWindowSpec(**{**shape, "head_dim": 2}, sliding_window=8, block_size=2)
    assert FullAttentionSpec(**shape, block_size=2).offsets == (0, 16, 32, 48, 64)
    assert narrow.bytes_per_block == 64
    group_layers([FullAttentionSpec(**shape, block_size=2), narrow])
    wide = FullAttentionSpec(**{**shape, "head_dim": 12}, block_size=4)
    assert wide.bytes_per_block == 2 * narrow.bytes_per_block, (
        "but four tokens of the narrow kind take no more than two"
    )
    with pytest.raises(UnsupportedError, match="no number of blocks"):
        group_layers([wide, narrow])
