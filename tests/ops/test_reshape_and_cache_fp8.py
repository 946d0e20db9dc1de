"""Writes to fp8 caches: every path gives the oracle's bits."""

from __future__ import annotations

import math

import pytest
import torch
from test_reshape_and_cache import SLOTS, equal_bits, fused_rows, make_cache, moved

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.testing.op_oracles import reshape_and_cache_oracle

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = {
    "none": (None, None),
    "float": (0.3, 7.0),
    "tensor": (torch.tensor([0.07]), torch.tensor(3.0)),
    "head": (torch.tensor([0.03, 1.0, 250.0]), torch.tensor([1e-3, 0.5, 3.0])),
}
# What rounding and saturation may get wrong: ties, subnormals, the largest values of both formats and just above.
EDGES = [0.0, 1e-30, 2**-9, 2**-10, 3 * 2**-10, 2**-16, 2**-17, 2**-6, 2**-7 + 2**-12, 17.0, 18.0, 19.0, 447.9, 448.0,
         449.0, 463.9, 464.0, 480.0, 57344.0, 61439.0, 61440.0, 65504.0, math.inf, math.nan]  # fmt: skip


@pytest.mark.parametrize("kind", sorted(SCALES))
@pytest.mark.parametrize("stored", FP8)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("layout", "dim", "dim_v"), [("NHD", 16, 64), ("HND", 24, 7), ("both", 40, 72)])
def test_every_kind_of_scale(device, any_path, given, stored, kind, layout, dim, dim_v) -> None:
    host, rows = make_cache(layout, 3, dim, dim_v, stored), fused_rows(len(SLOTS) + 1, 3, dim, dim_v, given)
    rows[0].mul_(torch.tensor([1e-3, 1.0, 300.0])[:, None])
    edges = torch.tensor(EDGES + [-x for x in EDGES])
    for one, part in zip(rows, edges.view(2, len(SLOTS), 3), strict=True):
        one[: len(SLOTS), :, 0] = part
    scales = SCALES[kind]
    wanted = [
        reshape_and_cache_oracle(one, cache, SLOTS, 1.0 if scale is None else scale)
        for one, cache, scale in zip(rows, host, scales, strict=True)
    ]
    key, value, key_cache, value_cache = (moved(one, device) for one in (*rows, *host))
    k_scale, v_scale = (x.to(device) if isinstance(x, torch.Tensor) else x for x in scales)
    slots = torch.tensor(SLOTS, device=device)
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale, path=any_path)
    assert equal_bits(key_cache, wanted[0]) and equal_bits(value_cache, wanted[1])


@pytest.mark.parametrize("given", [torch.float16, torch.float32])
@pytest.mark.parametrize(("row_at", "cache_at"), [(0, 3), (1, 0), (2, 8), (0, 8)])
def test_addresses_that_are_multiples_of_nothing(device, any_path, given, row_at, cache_at) -> None:
    """Rows and caches that begin anywhere inside wider ones; what is beside them stays."""
    wide = torch.zeros(6, 4, 2, 48, dtype=torch.uint8, device=device)
    cache = wide.view(torch.float8_e4m3fn)[..., cache_at : cache_at + 32]
    rows = torch.randn(2, 2, 48).to(given).to(device)[..., row_at : row_at + 32]
    want = reshape_and_cache_oracle(rows.cpu(), cache.cpu(), [3, 17], 0.01)
    slots = torch.tensor([3, 17], device=device)
    ops.reshape_and_cache(rows, None, cache, None, slots, k_scale=0.01, path=any_path)
    assert equal_bits(cache, want)
    assert not wide[..., :cache_at].any() and not wide[..., cache_at + 32 :].any()


def test_many_tokens(device, any_path) -> None:
    """Several of them per thread in the extension's kernel."""
    count = 100 if any_path == "triton" and device.type == "cpu" else 70001
    rows, slots = torch.randn(count, 1, 16).half(), torch.randperm(count + 3)[:count]
    cache = torch.zeros(1, count + 3, 1, 16, device=device).to(torch.float8_e4m3fn)
    want = torch.zeros(count + 3, 16)
    want[slots] = (rows[:, 0].float() / 0.7).to(torch.float8_e4m3fn).float()
    ops.reshape_and_cache(rows.to(device), None, cache, None, slots.to(device), k_scale=0.7, path=any_path)
    assert torch.equal(cache[0, :, 0].cpu().float(), want)


@pytest.mark.parametrize("stored", FP8)
def test_the_nearest_of_all_values_is_stored(device, any_path, stored) -> None:
    """Against the table of the format's values, not torch's conversion: each value, each midpoint, and just beside."""
    table = torch.arange(256, dtype=torch.uint8).view(stored).double()
    table = table[table.isfinite()].unique()
    middle = (table[1:] + table[:-1]) / 2
    beside = [middle.float().nextafter(torch.tensor(x)) for x in (-math.inf, math.inf)]
    asked = torch.cat([table, middle, *beside])
    rows = torch.cat((asked, torch.tensor([1e6, -1e6, math.inf, -math.inf]))).float()
    distance = (rows.double().clamp(table[0], table[-1])[:, None] - table).abs()
    best = distance == distance.min(1, keepdim=True).values
    even = table.to(stored).view(torch.uint8) % 2 == 0
    nearest = torch.where(best.sum(1) == 1, best.int().argmax(1), (best & even).int().argmax(1))
    cache = torch.zeros(1, len(rows), 1, 1, dtype=torch.float32, device=device).to(stored)
    slots = torch.arange(len(rows), device=device)
    ops.reshape_and_cache(rows.view(-1, 1, 1).to(device), None, cache, None, slots, path=any_path)
    assert torch.equal(cache.flatten().cpu().double(), table[nearest])


@pytest.mark.parametrize("stored", FP8)
def test_rows_that_are_fp8_already_are_copied(device, any_path, stored) -> None:
    rows = torch.randint(0, 256, (3, 2, 24), dtype=torch.uint8, device=device)
    cache = torch.zeros(6, 4, 2, 24, dtype=torch.uint8, device=device)
    slots = torch.tensor([3, 9, -1], device=device)
    ops.reshape_and_cache(rows.view(stored), None, cache.view(stored), None, slots, path=any_path)
    assert torch.equal(cache[0, 3], rows[0]) and torch.equal(cache[2, 1], rows[1])
    assert int((cache != 0).sum()) == int((rows[:2] != 0).sum())


@pytest.mark.parametrize(
    ("dtype", "scale", "match"),
    [
        (torch.float32, 0.5, "k_scale must be None, as rows are stored as they are"),
        (torch.float8_e5m2, 0.0, "a positive finite number"),
        (torch.float8_e5m2, math.inf, "a positive finite number"),
        (torch.float8_e4m3fn, torch.ones(3), r"float32 \[1\] or \[2\]"),
        (torch.float8_e4m3fn, torch.ones(2).half(), r"float32 \[1\] or \[2\]"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(dtype, scale, match) -> None:
    cache, slots = torch.zeros(6, 4, 2, 16).to(dtype), torch.tensor([0, 1])
    with pytest.raises(InvalidInputError, match=match):
        ops.reshape_and_cache(torch.ones(2, 2, 16), None, cache, None, slots, k_scale=scale)
    assert not cache.float().any()


def test_what_fp8_is_not_made_of_is_refused() -> None:
    cache, slots = torch.zeros(6, 4, 2, 16).to(torch.float8_e5m2), torch.tensor([0, 1])
    with pytest.raises(InvalidInputError, match="float16 or bfloat16 or float32 or float8_e5m2"):
        ops.reshape_and_cache(torch.ones(2, 2, 16, dtype=torch.int32), None, cache, None, slots)


@pytest.mark.parametrize("scale", [1e39, 2.0**128 - 2.0**103, 2.0**-150, 1e-50, -1.0, float("nan"), float("inf")])
def test_a_scale_that_float32_cannot_hold_is_refused(scale) -> None:
    cache, rows = torch.zeros(3, 4, 1, 8, dtype=torch.float8_e4m3fn), torch.ones(1, 1, 8)
    with pytest.raises(InvalidInputError, match="k_scale must be a positive finite number as a float32"):
        ops.reshape_and_cache(rows, None, cache, None, torch.tensor([0]), k_scale=scale)


def test_scales_are_float32_whatever_the_default_dtype() -> None:
    rows, slots = torch.linspace(-9, 9, 4096).view(8, 1, 512), torch.arange(8)
    caches = [torch.zeros(2, 4, 1, 512, dtype=torch.float8_e4m3fn) for _ in range(2)]
    for cache, dtype in zip(caches, (torch.float32, torch.bfloat16), strict=True):
        torch.set_default_dtype(dtype)
        try:
            ops.reshape_and_cache(rows, None, cache, None, slots, k_scale=1.0038, path="torch")
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
