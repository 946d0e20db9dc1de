"""Codes as operands of the Hopper kernels for them: numbers and orders of all formats, without a GPU."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from device_functions import as_python, values

from pagedattn.formats.bit_packing.packing import pack
from pagedattn.formats.turboquant.codebook import LEVELS
from pagedattn.formats.turboquant.format import TurboQuantRows

operands = pytest.importorskip("pagedattn.kernels.decode_sm90.operands")
FAMILY = "pagedattn.kernels.decode_sm90"
operands_4bit = import_module(f"{FAMILY}.operands_4bit")
spread_codes = import_module(f"{FAMILY}.spread_codes")
warpgroup_values = import_module(f"{FAMILY}.warpgroup_values")
many_rows_convert = import_module(f"{FAMILY}.many_rows_convert")
MODULES = [operands, operands_4bit, spread_codes, warpgroup_values, many_rows_convert]
MODULES += [
    import_module(one) for one in (f"{FAMILY}.axes", f"{FAMILY}.operands_16bit", "pagedattn.kernels.gluon_e4m3")
]

WARPS, KEYS, ROWS, DIMS = 4, 16, 8, (64, 128, 256)
FORMATS = ("e4m3", "e5m2", "int8", "int4_per_channel", "rotated_int4", "turboquant4", "turboquant3", "turboquant2")
KEY_FORMATS = [one for one in FORMATS if one != "rotated_int4"]
VALUE_FORMATS = [one for one in FORMATS if one != "int4_per_channel"]


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    as_python(monkeypatch, MODULES)


class Memory:
    """Shared memory [warps, rows, words]."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def slice(self, first: int, count: int, dim: int) -> Memory:
        return Memory(self.words.narrow(dim, first, count))

    def load(self, layout: Any) -> torch.Tensor:
        return values(self.words.contiguous())


def stored(codes: str, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows as they are stored, words [rows, words], and what their elements stand for, float64 [rows, dim]."""
    if codes in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if codes == "e4m3" else torch.float8_e5m2
        x = torch.randn(rows, dim).to(dtype)
        return x.view(torch.int32), x.double()
    if codes == "int8":
        x = torch.randint(-128, 128, (rows, dim), dtype=torch.int8)
        return x.view(torch.int32), x.double()
    bits = int(codes[-1]) if codes.startswith("turboquant") else 4
    number = torch.randint(0, 1 << bits, (rows, dim))
    if bits < 4 or codes == "turboquant4":
        return TurboQuantRows(bits)._pack(number).view(torch.int32), torch.tensor(LEVELS[bits])[number].double()
    return pack(number, 4).view(torch.int32), (2 * number - 15 if codes == "rotated_int4" else number).double()


def loaded(words: torch.Tensor, codes: str, layout: Any) -> torch.Tensor:
    """Words [warps, rows, words] as the kernels load them."""
    return spread_codes.load_spread(Memory(words), codes, layout) if spread_codes.is_spread(codes) else values(words)


def tables(codes: str, layout: Any) -> Any:
    return operands_4bit.level_tables(torch.tensor(0, dtype=torch.int32), layout, codes)


def width(codes: str, dim: int) -> int:
    """Words of a row as operands take them."""
    return dim // operands.codes_of_word(codes)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codes", KEY_FORMATS)
def test_keys_and_queries_have_their_elements_in_one_order(codes: str, dim: int) -> None:
    words, want = stored(codes, WARPS * KEYS, dim)
    layout = operands.key_words(WARPS, KEYS, width(codes, dim))
    given = loaded(words.reshape(WARPS, KEYS, -1), codes, layout)
    found = operands.key_operand(given, tables(codes, layout), torch.float16, codes, None)
    if codes == "int4_per_channel":
        steps, least = torch.rand(WARPS, dim).half(), torch.randn(WARPS, dim).half()
        as_words = (x.view(torch.int32) for x in (steps, least))
        found = operands_4bit.keys_of_steps(values(found), *(values(x) for x in as_words))
        want = want.reshape(WARPS, KEYS, dim) * steps.double()[:, None] + least.double()[:, None]
        want = want.half().double()
    queries = torch.randn(ROWS, dim).double()
    if operands.is_4_bit(codes):
        ordered = operands_4bit.in_key_order(spread_codes.in_spread_order(queries, codes))
    else:
        ordered = operands.in_order_of_bytes(queries)
        index = torch.arange(dim)
        assert torch.equal(ordered, queries[:, operands.key_element(index, codes)])
    keys = found.double() - operands.key_offset(codes)
    torch.testing.assert_close(keys.reshape(-1, dim) @ ordered.T, want.reshape(-1, dim) @ queries.T)


@pytest.mark.parametrize("dim", [*DIMS, "of a warpgroup"])
@pytest.mark.parametrize("codes", VALUE_FORMATS)
def test_values_are_put_in_order(codes: str, dim: int | str) -> None:
    """Of a warp heads of any size, of a warpgroup of 128 elements."""
    module, dim = (operands, dim) if isinstance(dim, int) else (warpgroup_values, 128)
    words, want = stored(codes, WARPS * KEYS, dim)
    parts = words.reshape(WARPS, KEYS // 2, 2, -1).unbind(2)
    weights, want = torch.randn(WARPS, KEYS, ROWS).double(), want.reshape(WARPS, KEYS, dim)
    if module is operands:
        layout = operands.value_words(WARPS, KEYS, width(codes, dim))
        even, odd = (loaded(x, codes, layout) for x in parts)
        found = operands.value_operand(even, odd, tables(codes, layout), torch.float16, codes, None)
        got = operands.in_order(found.double() @ weights, codes).reshape(WARPS, ROWS, dim)
        expected = weights.mT @ want
    else:
        layout = warpgroup_values.value_words(width(codes, dim))
        even, odd = (loaded(x, codes, layout) for x in parts)
        found = warpgroup_values.value_operand(even, odd, tables(codes, layout), codes, None)
        got = warpgroup_values.in_order(found.double() @ weights.reshape(-1, ROWS), codes)
        expected = (weights.mT @ want).sum(0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codes", FORMATS)
def test_rows_become_numbers_in_their_order(codes: str, dim: int) -> None:
    words, want = stored(codes, WARPS * KEYS, dim)
    layout = many_rows_convert._word_layout(width(codes, dim), codes)
    given = loaded(words.reshape(WARPS, KEYS, -1), codes, layout)
    found = many_rows_convert._numbers(given, tables(codes, layout), codes)
    assert torch.equal(found.double(), want.reshape(WARPS, KEYS, dim))


@pytest.mark.parametrize("scale", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_nothing_to_rows_that_do_not_see_it(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_loop = import_module(f"{FAMILY}.key_loop")
    as_python(monkeypatch, [key_loop, import_module("pagedattn.kernels.gluon_even_split")])
    monkeypatch.setattr(key_loop, "approximate", lambda name, x: x.log2())
    scales = torch.ones(1, KEYS, 1)
    scales[0, 14] = scale
    staging = SimpleNamespace(K_STRIDES=None, V_STRIDES=(1,), load_value_scales=lambda *_: scales)
    n = torch.arange(KEYS).reshape(1, KEYS, 1)
    q_pos, ones = torch.tensor([13, 14]), torch.ones(1, 2)
    given = (torch.zeros(1, KEYS, 2), ones, n, n < 15, staging, 0, 0, 0, q_pos, 0.0, 0.0)
    s, log, of_values = key_loop.logits_of(*given, "int8", (1, 0), False, False, False, None)
    weights = s.exp2() * of_values
    assert weights[0, :, 0].tolist() == [1.0] * 14 + [0.0] * 2 and (s + log)[0, 14, 0] == -torch.inf
    assert weights[0, 14, 1].isnan() and weights[0, :14, 1].eq(1).all() and weights[0, 15].eq(0).all()


def test_threads_of_half_a_word_are_beside_each_other() -> None:
    for words in (16, 32):
        layout = warpgroup_values.value_words(words)
        assert [one[2] for one in layout.lane_bases[2:]] == ([0, 1, 2] if words == 16 else [1, 2, 4])
        assert [one[2] for one in layout.warp_bases] == ([4, 8] if words == 16 else [8, 16])


def test_instructions_as_they_are_documented() -> None:
    def run(text: str, *inputs: int) -> int:
        (found,) = ptx.run(text, [np.array([x], np.uint32) for x in inputs], 1)
        return int(found[0])

    assert run("prmt.b32 $0, $1, $2, 0x7410;", 0x03020100, 0x07060584) == 0x07840100
    assert run("prmt.b32 $0, $1, 0, 0x8901;", 0x0302F100) == 0x00FF00F1, "signs"
    assert run("lop3.b32 $0, $1, $2, $3, 0xEA;", 0b1100, 0b1010, 0b0001) == 0b1001, "(a & b) | c"
    assert run("lop3.b32 $0, $1, $2, $3, 0xE4;", 0b1100, 0b1010, 0b0110) == 0b1100, "c ? a : b, of bits"
    assert run("{ .reg .b32 x; sub.u32 x, $1, $2; add.u32 $0, x, 1; }", 0, 1) == 0
    assert run("fma.rn.f16x2 $0, $1, $2, $3;", 0x3C014000, 0x3C013C00, 0xBC020000) == 0x00104000, "rounded once"
