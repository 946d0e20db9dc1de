"""Codes that the Hopper prefill kernel converts: numbers and orders, without a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from device_functions import as_python, values
from test_decode_sm90_operands import stored

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
code_values = import_module("pagedattn.kernels.prefill_sm90.code_values")


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    as_python(monkeypatch, [code_values])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("codes", ["e4m3", "e5m2", "int8"])
def test_words_become_what_they_stand_for_in_order(codes: str, dim: int) -> None:
    """All exactly, int8 times scales of four significant bits from 2**-20 to 240, which a tile's largest is below."""
    torch.manual_seed(0)
    words, numbers = stored(codes, 16, dim)
    scales = torch.randint(8, 16, (16,)) * 2.0 ** torch.arange(-23, 5)[torch.linspace(0, 27, 16).long()]
    found = code_values._elements(values(words), values(scales), codes).contiguous().view(torch.float16).double()
    expected = numbers * scales.double()[:, None] if codes == "int8" else numbers
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
