"""The formats of 8-bit floats: an element is stored as saturate(element / scale), the scale being given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest finite value of each
# What an error says of a scale that is none.
POSITIVE_SCALE = "stored is value / scale: take the largest |value| / 448 (57344 of fp8_e5m2), or None for 1"
SMALLEST_MAXIMUM = 2.0**-117  # of elements: below, their scale, which is it / 448, would be no normal number
_SCALES = (2.0**-150, 2.0**128 - 2.0**103)  # what lies between is a positive finite float32 when rounded


class Fp8Rows(RowFormat):
    """Elements of one fp8 dtype, rounded to nearest even and saturated; NaN stays NaN."""

    takes_scale = True

    def __init__(self, stored: torch.dtype) -> None:
        self.stored = stored
        self.codes = "e4m3" if stored == torch.float8_e4m3fn else "e5m2"
        self.name = f"fp8_{self.codes}"

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(self.stored, dim),)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        most = FP8[self.stored]
        divided = rows.float() if scale is None else rows.float() / scale[:, None]
        return (divided.clamp(-most, most).to(self.stored),)

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        return planes[0].to(dtype)

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KERNELS

        return KERNELS[self.stored]


def is_scale(number: float) -> bool:
    """Whether stored elements may be multiplied with this number: a positive finite float32."""
    return _SCALES[0] < number < _SCALES[1]


_E4M3, _E5M2 = Fp8Rows(torch.float8_e4m3fn), Fp8Rows(torch.float8_e5m2)
E4M3 = CacheFormat("fp8_e4m3", _E4M3, _E4M3, has_csrc=True)
E5M2 = CacheFormat("fp8_e5m2", _E5M2, _E5M2, has_csrc=True)
