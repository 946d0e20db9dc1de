"""The k8v4 format: levels, scales and rotation of its values, by the torch half and by the Triton writer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from format_rows import device_of, normal

from pagedattn import PagedKVCache, ops
from pagedattn.formats.hadamard.rotation import block_of, hadamard, rotate_back, signs
from pagedattn.formats.int8.format import INT8
from pagedattn.formats.k8v4.format import K8V4

DIMS = (1, 3, 8, 40, 64, 72, 96, 128, 256)


def error(rows: torch.Tensor) -> float:
    """Squared, of what comes back, over the rows' squares."""
    back = K8V4.value.decode(K8V4.value.encode(rows), rows.shape[-1], torch.float64)
    return float((back - rows).square().sum() / rows.double().square().sum())


def test_normal_rows_have_the_least_error_of_even_steps() -> None:
    assert 0.0100 < error(normal(4000, 1, 128)) < 0.0106, "0.0107 and more with another number of steps"


@pytest.mark.parametrize("dim", DIMS)
def test_codes_are_the_nearest_levels_of_steps_of_the_largest_element(dim: int) -> None:
    rows = normal(50, 1, dim)
    packed, scale = K8V4.value.encode(rows)
    turned = hadamard(rows.double() * signs(dim, rows.device)) * block_of(dim) ** -0.5
    steps = turned / (turned.abs().amax(-1, keepdim=True) / 8.5)
    wanted = (steps.floor() + 8).clamp(0, 15)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :dim]
    near_an_edge = (steps - steps.round()).abs() < 1e-2  # elements are rounded to 12 binary digits
    assert torch.equal(codes[~near_an_edge].double(), wanted[~near_an_edge]) and near_an_edge.float().mean() < 0.1
    levels = 2.0 * codes.double() - 15
    best = (turned * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
    torch.testing.assert_close(scale.double(), best, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_keeps_lengths_and_is_undone(dim: int) -> None:
    rows = normal(50, dim).double()
    turned = hadamard(rows * signs(dim, rows.device)) * block_of(dim) ** -0.5
    torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))
    torch.testing.assert_close(rotate_back(turned), rows)
    assert set(signs(dim, rows.device).tolist()) <= {-1.0, 1.0}
    assert abs(float(signs(1 << 14, rows.device).mean())) < 0.05


def test_rows_that_are_far_from_normal() -> None:
    spike = torch.zeros(1, 1, 128)
    spike[..., 5] = 7.0
    for rows in (spike, torch.full((1, 1, 128), 3.0), normal(1, 1, 128) * 1e30, normal(1, 1, 128) * 1e-30):
        assert error(rows) < 0.03


def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    rows = normal(4, 2, 64)
    rows[0, 0], rows[1, 1, 3], rows[2, 0, 60], rows[3, 1, 0] = 0.0, math.nan, math.inf, -math.inf
    back = K8V4.value.decode(K8V4.value.encode(rows), 64, torch.float32)
    assert not back[0, 0].any()
    spoiled = torch.zeros(4, 2, dtype=torch.bool)
    spoiled[1, 1] = spoiled[2, 0] = spoiled[3, 1] = True
    assert torch.equal(back.isnan().any(-1), spoiled) and torch.equal(back.isnan().all(-1), spoiled)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize(("dim", "value_dim", "heads"), [(128, 128, 3), (12, 72, 2), (64, 7, 1), (8, 1, 2)])
def test_rows_are_written_bit_by_bit_as_encoded(path: str, dim: int, value_dim: int, heads: int) -> None:
    device = device_of(path)
    shape: dict[str, Any] = {"head_dim_v": value_dim, "kv_cache_dtype": "k8v4", "device": device}
    cache = PagedKVCache(1, 4, 4, heads, dim, **shape).layer(0)
    key, value = normal(6, heads, dim), normal(6, heads, value_dim, seed=1)
    value[1] *= 1e30
    value[3, 0], value[4, 0, 0], value[5] = 0.0, math.nan, value[5] * 1e-20
    slots = torch.tensor([7, 2, -1, 15, 16 - 1 - 1, 3])
    new = key.to(device), value.to(device)
    ops.reshape_and_cache(*new, cache.key, cache.value, slots.to(device), path=path, **cache.stored)
    for rows, form, codes, scales in (
        (key, INT8.key, cache.key, cache.key_scale),
        (value, K8V4.value, cache.value, cache.value_scale),
    ):
        assert scales is not None
        stored = [plane.flatten(0, 1).cpu() for plane in (codes, scales)]
        wanted: Any = [torch.zeros_like(plane) for plane in stored]
        kept = slots >= 0
        for to, found in zip(wanted, form.encode(rows[kept]), strict=True):
            to[slots[kept]] = found
        assert torch.equal(stored[0], wanted[0])
        assert torch.equal(stored[1].view(torch.int32), wanted[1].view(torch.int32))


def test_what_a_token_takes() -> None:
    cache = PagedKVCache(1, 2, 16, 4, 128, kv_cache_dtype="k8v4")
    assert cache.bytes_per_block == 16 * 4 * (128 + 4 + 64 + 4)
