"""Workspaces of kernels that split keys: counters, which are zero between launches, then room for partial results."""

from __future__ import annotations

import torch

COUNTERS = 2048  # programs of a decode launch at most; a workspace starts with three counters for each


def new_workspace(elements: int, device: torch.device) -> torch.Tensor:
    """A workspace of `elements` int32 elements: counters, which are zero, then memory written before it is read."""
    workspace = torch.empty(max(elements, 3 * COUNTERS), dtype=torch.int32, device=device)
    workspace[: 3 * COUNTERS].zero_()
    return workspace
