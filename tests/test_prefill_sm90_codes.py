"""Codes that the Hopper prefill kernel converts, and outputs of rotated values: numbers and orders, without a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from device_functions import as_python, values
from test_decode_sm90_operands import stored

from pagedattn.formats.hadamard import rotation as hadamard
from pagedattn.formats.int4.format import ChannelSteps

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
FAMILY = "pagedattn.kernels.prefill_sm90"
code_values, rotation, scale_planes = (
    import_module(f"{FAMILY}.{name}") for name in ("code_values", "rotation", "scale_planes")
)


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    as_python(monkeypatch, [code_values, rotation, scale_planes])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("codes", ["e4m3", "e5m2", "int8", "rotated_int4"])
def test_words_become_what_they_stand_for_in_order(codes: str, dim: int) -> None:
    """int8 exactly, times scales of four significant bits from 2**-20 to 30, which a tile's largest is below; those of
    values of 4 bits have more, and are rounded."""
    torch.manual_seed(0)
    words, numbers = stored(codes, 16, dim)
    exponents = torch.arange(-23, 2)[torch.linspace(0, 24, 16).long()]
    scales = torch.rand(16) * 32 if codes == "rotated_int4" else torch.randint(8, 16, (16,)) * 2.0**exponents
    found = code_values._elements(values(words), values(scales), codes).contiguous().view(torch.float16).double()
    scaled = codes in ("int8", "rotated_int4")
    expected = numbers * scales.double()[:, None] if scaled else numbers
    if codes == "rotated_int4":
        assert float(((found - expected).abs() / expected.abs()).max()) < 2**-10
    else:
        assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


def test_codes_of_channels_are_what_their_format_says() -> None:
    """Exactly, of four groups of 32 keys, each with steps of its own: 15 steps may be beyond float16."""
    torch.manual_seed(0)
    dim, rows = 128, ChannelSteps()
    keys = torch.randn(4, 32, 1, dim) * torch.rand(4, 1, 1, dim) * 2.0 ** torch.randint(-12, 9, (4, 1, 1, dim))
    keys[:, :, 0, 0] = torch.linspace(-65472, 65472, 32)
    keys[:, :, 0, 1], keys[:, :, 0, 2] = 3.7, keys[:, :, 0, 3] * 1e-7
    codes, channels = rows.encode(keys)
    words = codes.reshape(4, 32, dim // 2).contiguous().view(torch.int32)
    pairs = channels.reshape(4, 2 * dim).contiguous().view(torch.int32).flatten()
    found = code_values._channel_elements(values(words), values(pairs)).contiguous().view(torch.float16)
    expected = rows.decode((codes, channels), dim, torch.float64).reshape(128, dim)
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 3e-30, 1.0, 1.999, 2.0, 1e30])
def test_a_tile_has_a_unit_in_which_scales_fit_float16(largest: float) -> None:
    """Of those that are finite; 1,152 times them, which products are less, are below its largest."""
    scales = values(torch.full((32, 4), 0.5 * largest))
    scales[3, 1], scales[4, 0], scales[5, 2] = largest, torch.nan, torch.inf
    unit = scale_planes._unit(scales).as_subclass(torch.Tensor)
    factor = largest / 2.0 ** int(unit)
    assert -100 <= int(unit) <= 127 and factor < 32
    assert factor >= 16 or int(unit) == -100
    assert float(scale_planes._power_of_two(values(-unit))) == 2.0 ** -int(unit)


@pytest.mark.parametrize("dim", [128, 256])
def test_outputs_lose_the_rotation_of_values(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, dim)
    monkeypatch.setattr(rotation, "_signs", lambda index: hadamard.signs(dim, index.device))
    monkeypatch.setattr(rotation, "_of_other_lane", lambda x, bit: x[:, torch.arange(dim) ^ 1 << bit])
    found = rotation.rotate_back(values(rows), 0).double()
    assert float((found - hadamard.rotate_back(rows.double())).abs().max()) < 1e-5
