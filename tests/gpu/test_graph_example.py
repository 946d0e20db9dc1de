"""The examples that need a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_graph_replays_what_eager_steps_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "examples"))
    assert 0 <= import_module("cuda_graph").main() < 2e-2  # bfloat16, and splits that depend on the bounds
