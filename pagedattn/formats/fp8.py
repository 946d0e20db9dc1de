"""The formats of 8-bit floats."""

from __future__ import annotations

import torch

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest finite value of each
