"""Codes that the Hopper prefill kernel converts: numbers and orders, without a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from device_functions import as_python, values
from test_decode_sm90_operands import stored

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
code_values, scale_planes = (
    import_module(f"pagedattn.kernels.prefill_sm90.{name}") for name in ("code_values", "scale_planes")
)


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    as_python(monkeypatch, [code_values, scale_planes])


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


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 3e-30, 1.0, 1.999, 2.0, 1e30])
def test_a_tile_has_a_unit_in_which_scales_fit_float16(largest: float) -> None:
    """Of those that are finite; 127 times them are at most half of its largest number."""
    scales = values(torch.full((32, 4), 0.5 * largest))
    scales[3, 1], scales[4, 0], scales[5, 2] = largest, torch.nan, torch.inf
    unit = scale_planes._unit(scales).as_subclass(torch.Tensor)
    factor = largest / 2.0 ** int(unit)
    assert -100 <= int(unit) <= 127 and factor < 256
    assert factor >= 128 or int(unit) == -100
    assert float(scale_planes._power_of_two(values(-unit))) == 2.0 ** -int(unit)
