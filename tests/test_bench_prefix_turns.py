"""`python -m bench.prefix_turns` on a CPU: host memory turns misses into hits, and changes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedattn.bench import prefix_turns


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")
def test_second_turns_find_their_first(tmp_path: Path) -> None:
    file = tmp_path / "turns.json"
    assert prefix_turns.main(["--json", str(file)]) == 0
    without, kept = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert without["hit_rate"] == without["blocks_read_back"] == without["prefix_space"] == 0
    # All but what is new in the second turn: 64 of 304 tokens.
    assert kept["hit_rate"] == pytest.approx(240 / 304, abs=1e-3) and kept["blocks_read_back"] > 8 * 15 // 2
    assert kept["same_tokens"] and 0 < kept["second_turn_ms"] and 0 < without["first_turn_ms"]
