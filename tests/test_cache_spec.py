"""What a token costs, and how layers of several kinds are cut into groups that overlay one pool of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn.cache.specs import FullAttentionSpec, KVCacheSpec, MLASpec, SlidingWindowSpec, group_layers
from pagedattn.errors import InvalidInputError, UnsupportedError

FULL = FullAttentionSpec(num_kv_heads=2, head_dim=8)
WINDOW = SlidingWindowSpec(num_kv_heads=2, head_dim=8, sliding_window=32)


@pytest.mark.parametrize(
    ("spec", "bytes_per_token"),
    [
        (FULL, 2 * (8 + 8) * 4),
        (FullAttentionSpec(num_kv_heads=2, head_dim=8, head_dim_v=4), 2 * (8 + 4) * 4),
        (FullAttentionSpec(num_kv_heads=2, head_dim=8, dtype=torch.bfloat16), 2 * (8 + 8) * 2),
        (FullAttentionSpec(num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, kv_cache_dtype="fp8"), 2 * (8 + 8)),
        (FullAttentionSpec(num_kv_heads=2, head_dim=8, kv_cache_dtype="fp8_e5m2"), 2 * (8 + 8)),
        (FullAttentionSpec(num_kv_heads=2, head_dim=8, kv_cache_dtype="int8"), 2 * (8 + 8) + 2 * 2 * 4),
        (MLASpec(num_kv_heads=1, head_dim=576, latent_dim=512, dtype=torch.bfloat16), 576 * 2),
        (MLASpec(head_dim=576, latent_dim=512, dtype=torch.bfloat16, kv_cache_dtype="fp8"), 576),
    ],
)
def test_bytes_per_token(spec: KVCacheSpec, bytes_per_token: int) -> None:
    assert spec.bytes_per_token == bytes_per_token
    assert spec.bytes_per_block == 16 * bytes_per_token


def test_only_windowed_layers_have_a_window() -> None:
    assert (FULL.window(), WINDOW.window()) == (None, 32)


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ([FULL] * 3, [(0, 1, 2)]),
        ([FULL, WINDOW] * 2, [(0, 2), (1, 3)]),
        ([WINDOW, WINDOW, FULL] * 2, [(0, 1), (3, 4), (2, 5)]),
        ([FULL] * 2 + [WINDOW] * 3, [(0, 1), (2, 3), (4,)]),
        ([FULL] + [WINDOW] * 3, [(0,), (1,), (2,), (3,)]),
    ],
    ids=["one kind", "alternating", "two to one", "a rest", "one of a kind"],
)
def test_layers_are_cut_into_groups_as_long_as_the_rarest_kind(
    specs: list[KVCacheSpec], groups: list[tuple[int, ...]]
) -> None:
    found = group_layers(specs)
    assert [group.layers for group in found] == groups
    assert sorted(layer for group in found for layer in group.layers) == list(range(len(specs)))
    assert all(specs[layer] == group.spec for group in found for layer in group.layers)


def test_layers_with_different_windows_are_of_different_kinds() -> None:
    other = SlidingWindowSpec(num_kv_heads=2, head_dim=8, sliding_window=64)
    assert [group.layers for group in group_layers([WINDOW, other])] == [(0,), (1,)]


def test_block_sizes_are_scaled_where_bytes_differ() -> None:
    wide = FullAttentionSpec(num_kv_heads=2, head_dim=32)
    groups = group_layers([wide, WINDOW, wide, WINDOW])
    assert [group.spec.block_size for group in groups] == [16, 64]
    assert {group.spec.bytes_per_block for group in groups} == {wide.bytes_per_block}
    assert groups[1].spec.window() == 32


def test_bytes_that_do_not_divide_are_refused_with_both_numbers() -> None:
    odd = FullAttentionSpec(num_kv_heads=3, head_dim=8)
    with pytest.raises(UnsupportedError, match=rf"{FULL.bytes_per_block} bytes.* {odd.bytes_per_block} bytes") as error:
        group_layers([FULL, odd])
    assert "block size" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "asked", "param"),
    [
        (FullAttentionSpec, {"head_dim_v": -3}, "head_dim_v"),
        (FullAttentionSpec, {"dtype": "fp8"}, "dtype"),
        (SlidingWindowSpec, {"sliding_window": 0}, "sliding_window"),
        (SlidingWindowSpec, {"sliding_window": 4, "head_dim": 0}, "head_dim"),
        (MLASpec, {"latent_dim": 17}, "latent_dim"),
        (MLASpec, {"latent_dim": 0}, "latent_dim"),
        (MLASpec, {"latent_dim": 8, "head_dim": 0}, "head_dim"),
        (MLASpec, {"latent_dim": 8, "num_kv_heads": 2}, "num_kv_heads"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(kind: Any, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{param} must be "):
        kind(**{"num_kv_heads": 1, "head_dim": 16, **asked})


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "k8v4", "int8:window=16"])
def test_latent_rows_are_native_or_e4m3(name: str) -> None:
    message = rf"kv_cache_dtype='{name}' is not served; use kv_cache_dtype='auto' or 'fp8'"
    with pytest.raises(UnsupportedError, match=message):
        MLASpec(head_dim=576, latent_dim=512, kv_cache_dtype=name)
    assert MLASpec(head_dim=576, latent_dim=512).num_kv_heads == 1
    with pytest.raises(InvalidInputError, match=r"^kv_cache_dtype must be one of"):
        MLASpec(head_dim=576, latent_dim=512, kv_cache_dtype="e4m3")


def test_no_layers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="specs must be"):
        group_layers([])
