"""Quotients and numbers of edges that device code finds by products: those of a division and of integers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import pagedattn.runtime.launcher  # noqa: F401 - it mends the interpreter
from pagedattn.formats.k8v4.device import HALF_STEPS, edges_below
from pagedattn.formats.rounding import divide, nearest_integer, saturating_quotient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _divide(x, y, per_y, out, whole, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    quotient = divide(tl.load(x + at), tl.load(y + at), tl.load(per_y + at))
    tl.store(out + at, quotient)
    tl.store(whole + at, nearest_integer(quotient))


@triton.jit
def _saturating(x, y, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, saturating_quotient(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _edges(sizes, out, M: tl.constexpr, N: tl.constexpr):
    at = (tl.program_id(0) * M + tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, edges_below(tl.load(sizes + at)))


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_quotients_are_those_of_a_division(off: int) -> None:
    """Of numbers half way between two multiples of y, of their neighbours, and of others; 1 / y a few bits off."""
    random = torch.Generator().manual_seed(0)
    digits, exponents = (
        torch.randint(low, high, (1 << 13,), generator=random) for low, high in ((1024, 2048), (-34, 5))
    )
    y = digits * 2.0**exponents
    y[:15] = torch.arange(1.0, 16.0)
    ties = (torch.randint(0, 16, y.shape, generator=random) + 0.5) * y
    others = torch.rand(y.shape, generator=random) * 16 * y
    neighbours = torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), torch.inf))
    x = torch.cat((ties, *neighbours, others, -others, torch.zeros_like(y)))
    y = y.repeat(6)
    per_y = ((1 / y).view(torch.int32) + off).view(torch.float32)
    x, y, per_y = x.to(DEVICE), y.to(DEVICE), per_y.to(DEVICE)
    out, whole = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int32, device=DEVICE)
    _divide[(len(x) // 4096,)](x, y, per_y, out, whole, N=4096)  # type: ignore[arg-type]
    assert torch.equal(out, (x.double() / y.double()).float())
    assert torch.equal(whole, (x.double() / y.double()).round().int()), "halves to even ones"


@pytest.mark.parametrize("exponents", [(-149, -126), (-126, -100), (-30, 30), (100, 128)])
def test_quotients_by_any_scale_are_those_of_a_division(exponents: tuple[int, int]) -> None:
    """Of numbers with 8, 11 and 24 significant bits, among them half way between two e4m3 times the scale."""
    random = torch.Generator().manual_seed(0)
    count = 1 << 14
    digits = torch.randint(1 << 23, 1 << 24, (count,), generator=random)
    digits[:4] = torch.tensor([1 << 23, (1 << 24) - 1, (1 << 23) + 1, (1 << 24) - 2])
    y = torch.ldexp(digits.double(), torch.randint(*exponents, (count,), generator=random) - 23).float()
    y[y == 0] = 2.0**-149
    ties = torch.ldexp(torch.randint(17, 32, (count,), generator=random).double(), torch.randint(-14, 4, (count,))) * y
    any_ = y.double() * torch.randn(count, generator=random)
    x = torch.cat((ties, any_, -any_.half().double(), any_.bfloat16().double())).float()
    x = torch.cat((x, x.nextafter(torch.zeros(())), x.nextafter(2 * x)))
    y = y.repeat(len(x) // count)
    out = torch.empty_like(x, device=DEVICE)
    _saturating[(len(x) // 4096,)](x.to(DEVICE), y.to(DEVICE), out, N=4096)  # type: ignore[arg-type]
    want = (x.double() / y.double()).float()
    inside = (want.abs() >= 2.0**-20) & (want.abs() <= 2.0**16)
    assert inside.sum() > len(x) / 3 and torch.equal(out.cpu()[inside], want[inside])
    assert bool((out.cpu()[want.abs() < 2.0**-20].abs() <= 2.0**-20).all())


def test_a_quotient_saturates_and_keeps_signs_and_nan() -> None:
    x = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, torch.nan, 0.0, -0.0, -1e-45])
    for scale in (2.0**-149, 2.0**-126, 0.7, 1.0, 3.0, 2.0**127):
        out = torch.empty_like(x, device=DEVICE)
        _saturating[(1,)](x.to(DEVICE), torch.full_like(x, scale).to(DEVICE), out, N=8)  # type: ignore[arg-type]
        out = out.cpu()
        assert out[0] >= 2**16 and out[1] <= -(2**16) and out[4].isnan() and out[5] == 0 and out[6] == 0
        assert out[2] >= min(3e38 / scale, 2**16) * 0.999 and out[3] == -out[2]
        assert out.signbit().tolist() == [False, True, False, True, bool(out[4].signbit()), False, True, True]


def test_numbers_of_edges_are_those_of_integers_for_each_largest_size() -> None:
    """Beside a row's largest size the last one before each edge, and the first one that reaches it."""
    most = torch.arange(1 << 18 | 1, device=DEVICE)[:, None]  # [2**18 + 1, 1]
    reached = -(-most * torch.arange(2, 16, 2, device=DEVICE) // HALF_STEPS)  # [2**18 + 1, 7]
    sizes = torch.cat((most, most // 2, reached, (reached - 1).clamp(min=0)), 1)
    rows, count = 4096, len(sizes)
    sizes = torch.cat((sizes, sizes.new_zeros(-count % rows, 16)))
    found = torch.empty(sizes.shape, dtype=torch.int32, device=DEVICE)
    _edges[(len(sizes) // rows,)](sizes.float(), found, M=rows, N=16)  # type: ignore[arg-type]
    largest = sizes.amax(1, keepdim=True)
    number = torch.stack([sizes * HALF_STEPS >= largest * edge for edge in range(2, 16, 2)]).sum(0).int()
    assert torch.equal(found, number)
    assert int(found[0].min()) == 7 and bool((found[1:count].amin(1) < 7).all())
