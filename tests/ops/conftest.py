"""Ops run on the GPU where there is one, and on every path everywhere."""

from __future__ import annotations

import pytest
import torch

from pagedattn.runtime import op_registry


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def path(request: pytest.FixtureRequest) -> str:
    """Of an op that the extension has not."""
    return request.param


@pytest.fixture(params=["csrc", "triton", "torch"])
def any_path(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Of an op that the extension has; skipped where that is not built."""
    if request.param == "csrc" and op_registry.path_of("copy_blocks", device) != "csrc":
        pytest.skip(f"the extension has nothing for {device}: {op_registry.csrc_status()}")
    return request.param
