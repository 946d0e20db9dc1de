"""Decode, prefill and mixed batches by pytest: `python -m pytest bench --backends TRITON,FA3 --result OUT.json`."""

from __future__ import annotations

import pytest
import torch

from .contenders import contenders
from .measure import measure
from .report import line
from .table import Case, cases

CASES = cases("all", torch.cuda.is_available())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suite}-{case.layer}-{case.text}")
def test_attention(benchmark, results, request, case: Case) -> None:
    chosen = contenders(request.config.getoption("--backends"))
    rows = benchmark.pedantic(measure, args=(case, chosen, results.meta), rounds=1, iterations=1)
    results.add(rows)
    print(*(f"\n{line(row)}" for row in rows), end="")
    assert not [row["refused"] for row in rows if str(row["refused"]).startswith("wrong")]
    assert any(row["us"] for row in rows)
