from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.testing.op_oracles import reshape_and_cache_oracle

SLOTS = [5, -1, 0, 23, 24, 2**40, -(2**63), 17]  # 24 slots: 24 and above are outside


def _cache(layout: str, heads: int, dim: int, device: torch.device) -> torch.Tensor:
    shape = (6, 4, heads, dim) if layout == "NHD" else (6, heads, 4, dim)
    cache = torch.randn(shape, device=device)
    return cache if layout == "NHD" else cache.transpose(1, 2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("heads", "dim", "dim_v"), [(2, 16, 16), (3, 24, 40), (1, 1, 7)])
def test_writes_what_it_should_and_nothing_else(device, path, layout, heads, dim, dim_v) -> None:
    key_cache, value_cache = (_cache(layout, heads, d, device) for d in (dim, dim_v))
    fused = torch.randn(len(SLOTS) + 2, heads * (dim + dim_v), device=device)  # two rows of padding
    key, value = fused.split([heads * dim, heads * dim_v], 1)
    key, value = key.unflatten(1, (heads, dim)), value.unflatten(1, (heads, dim_v))
    wanted = [
        reshape_and_cache_oracle(rows.cpu(), cache.cpu(), SLOTS)
        for rows, cache in ((key, key_cache), (value, value_cache))
    ]
    ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor(SLOTS, device=device), path=path)
    assert torch.equal(key_cache.cpu(), wanted[0]) and torch.equal(value_cache.cpu(), wanted[1])


def test_only_skipped_slots_change_nothing(device, path) -> None:
    cache = _cache("NHD", 2, 16, device)
    before = cache.clone()
    rows = torch.full((3, 2, 16), torch.nan, device=device)
    ops.reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor([-1, 24, 99], device=device), path=path)
    assert torch.equal(cache, before)


def test_values_may_be_a_view_of_keys(device, path) -> None:
    cache, rows = _cache("NHD", 1, 24, device), torch.randn(2, 1, 24, device=device)
    ops.reshape_and_cache(rows, None, cache, None, torch.tensor([3, 4], device=device), path=path)
    assert torch.equal(cache[0, 3], rows[0]) and torch.equal(cache[1, 0], rows[1])


@pytest.mark.parametrize(
    ("key", "slots", "match"),
    [
        (torch.zeros(2, 2, 15), torch.zeros(2, dtype=torch.int64), r"key must be float32 \[T, 2, 16\]"),
        (torch.zeros(2, 2, 16).half(), torch.zeros(2, dtype=torch.int64), "key must be float32"),
        (torch.zeros(1, 2, 16), torch.zeros(2, dtype=torch.int64), "at least 2 rows"),
        (torch.zeros(2, 2, 16), torch.zeros(2, dtype=torch.int32), "slot_mapping must be int64"),
        (torch.zeros(2, 2, 32)[..., ::2], torch.zeros(2, dtype=torch.int64), "last stride 1"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(key, slots, match) -> None:
    cache = torch.ones(6, 4, 2, 16)
    with pytest.raises(InvalidInputError, match=match):
        ops.reshape_and_cache(key, key, cache, cache, slots)
    assert bool((cache == 1).all())
