"""SampledRows: which rows of a step are sampled, and what the device knows of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class SampledRows(NamedTuple):
    """What the device has of the n rows whose next token is sampled; each [n] int32."""

    last_tokens: torch.Tensor  # the last of each one's tokens so far; empty where no row needs processing
    state_rows: torch.Tensor
    lengths: torch.Tensor  # tokens so far: the position of what is sampled
    row_indices: np.ndarray  # `state_rows`, on the host
