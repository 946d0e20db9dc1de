"""SampledRows: what the device knows of the rows of a step that are sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SampledRows(NamedTuple):
    """What the device has of the n rows whose next token is sampled; each [n] int32."""

    last_tokens: torch.Tensor  # the last of each one's tokens so far; empty where no row needs processing
    state_rows: torch.Tensor
    lengths: torch.Tensor  # tokens so far: the position of what is sampled
