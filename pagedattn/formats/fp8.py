"""The formats of 8-bit floats."""

from __future__ import annotations

import torch

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest finite value of each
_SCALES = (2.0**-150, 2.0**128 - 2.0**103)  # what lies between is a positive finite float32 when rounded


def is_scale(number: float) -> bool:
    """Whether stored elements may be multiplied with this number: a positive finite float32."""
    return _SCALES[0] < number < _SCALES[1]
