"""Ops run on the GPU where there is one, and on both paths everywhere."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param
