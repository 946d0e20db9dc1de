"""Rows that tests of cache formats store, and the device on which an op's path runs."""

from __future__ import annotations

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def device_of(path: str) -> torch.device:
    """A GPU, where there is one, of the path "triton": its kernels are not interpreted there."""
    return torch.device("cuda" if path == "triton" and torch.cuda.is_available() else "cpu")
