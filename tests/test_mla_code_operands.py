"""Operands of the Hopper kernel over latent codes: numbers and the orders of channels and keys, without a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from device_functions import as_python, values

operands = pytest.importorskip("pagedattn.kernels.mla_decode.hopper_fp8_operands")
e4m3 = import_module("pagedattn.kernels.gluon_e4m3")
totals = import_module("pagedattn.kernels.mla_decode.hopper_fp8_totals")
KEYS, LATENT, HALF, PANEL, SOME = 64, 512, 256, 128, 16


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    as_python(monkeypatch, [operands, e4m3, totals])
    for layout in ("factor_words", "output_layout"):
        monkeypatch.setattr(operands, layout, lambda *_: None)


def codes(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def words_of(rows: torch.Tensor) -> torch.Tensor:
    return values(rows.contiguous().view(torch.int32))


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(("channels", "width"), [(LATENT, PANEL), (64, 64)], ids=["latent", "rotated"])
def test_keys_and_queries_have_their_channels_in_one_order(channels: int, width: int) -> None:
    rows, queries = codes(KEYS, channels), torch.randn(8, channels).double()
    ordered = operands.in_key_order(queries, width)
    parts = [operands.key_operand(words_of(part), None) for part in rows.split(width, 1)]
    torch.testing.assert_close(torch.cat(parts, 1).double() @ ordered.T, rows.double() @ queries.T)


@pytest.mark.usefixtures("python")
def test_halves_of_a_group_follow_each_other() -> None:
    words = words_of(codes(KEYS, PANEL))
    halves = [operands.key_operand(half, None) for half in operands.halves_of(words)]
    assert torch.equal(torch.cat(halves, 1), operands.key_operand(words, None))


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("scaled", [False, True])
def test_values_are_put_in_order(scaled: bool) -> None:
    """scaled: times a factor of each key and group of channels, a float16."""
    rows, weights = codes(SOME, HALF), torch.randn(SOME, 16).double()
    panels = HALF // PANEL
    factors = 2.0 ** torch.randint(-3, 4, (SOME, panels)) if scaled else torch.ones(SOME, panels)
    words = None
    if scaled:
        both = factors.half().unflatten(0, (-1, 2)).transpose(1, 2).contiguous().view(torch.int32)
        words = values(both.expand(-1, -1, PANEL // 4).contiguous())
    products = operands.value_operand(words_of(rows), words, None).double() @ weights
    expected = rows.double() * factors.double().repeat_interleave(PANEL, 1)
    torch.testing.assert_close(operands.in_order(products), expected.T @ weights)


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("rows", [16, 32])
def test_sums_pass_between_warpgroups_in_the_order_of_threads(rows: int) -> None:
    """In the product's layout a thread has four elements beside each other, 16 bytes, in each line, by threads."""
    acc = values(torch.arange(HALF * rows).reshape(HALF, rows))
    first, second = totals._parts(acc)
    assert torch.equal(totals._joined(first, second, None), acc)
    sums = totals._by_thread(first)
    assert torch.equal(totals._by_channel(sums, None), first) and sums.shape == (rows // 4, 512)
    channel, row = first // rows, first % rows
    thread = channel % 64 // 16 * 32 + channel % 8 * 4 + row % 8 // 2
    assert torch.equal(totals._by_thread(thread), torch.arange(512).expand(rows // 4, 512) // 4)


@pytest.mark.usefixtures("python")
def test_queries_are_sums_of_two_codes() -> None:
    """To eight significant bits, all that a bfloat16 has, but for what is below 2**-16 of the largest."""
    torch.manual_seed(0)
    x = (torch.randn(64, 64) * torch.logspace(0, -4, 64)).bfloat16().float()
    down = torch.exp2(7 - x.abs().amax(1, keepdim=True).log2().floor()).expand_as(x)
    low, high = e4m3.two_e4m3(values(x), values(down.contiguous()))
    total = (low.float() + high.float()) / down
    assert ((total - x).abs() <= 2.0**-9 / down).all()  # the smallest code
    large = (x * down).abs() >= 0.25
    assert torch.equal(total[large], x[large])
    assert (low.float().abs() <= high.float().abs() / 16)[large].all()


def bank_of(row: int, byte: int, width: int) -> int:
    """Bank of a word of a row of so many bytes, in shared memory as TMA swizzles it."""
    swizzle = (row * width // 128 % 8) & (width // 16 - 1)
    return ((row * width + (byte ^ swizzle * 16)) // 4) % 32


@pytest.mark.parametrize(
    ("layout", "run", "width"),
    [
        pytest.param(lambda: operands.key_words(PANEL // 4), 4, 128, id="keys"),
        pytest.param(lambda: operands.key_words(16), 4, 64, id="rotated"),
        pytest.param(operands.value_words, 2, 128, id="values"),
    ],
)
def test_threads_that_read_together_use_no_bank_twice(layout: Any, run: int, width: int) -> None:
    """A thread reads `run` words at a time, and as many threads as have 128 bytes then read together."""
    bases = layout().lane_bases
    for first in range(0, 32, 32 // run):
        used = []
        for lane in range(first, first + 32 // run):
            row, word = (sum(base[axis] for i, base in enumerate(bases) if lane >> i & 1) for axis in (0, 1))
            used += [bank_of(row, 4 * (word + i), width) for i in range(run)]
        assert len(set(used)) == 32
