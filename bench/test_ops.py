"""Time of every op at several sizes by every path: `python -m pytest bench/test_ops.py --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Timed
from .op_table import OpCase, op_cases, paths_of
from .timing import now

CASES = {(case.op, case.size): case for case in op_cases() if case.name != "paged_attention"}
ROWS = [(op, size, path) for (op, size), case in CASES.items() for path in paths_of(case)]


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("op", "size", "path"), ROWS, ids=["-".join(row).replace(" ", "_") for row in ROWS])
def test_op(benchmark: Any, timed: Timed, op: str, size: str, path: str) -> None:
    case: OpCase = CASES[op, size]
    made = case.make(path)
    made.check()
    benchmark.extra_info |= {"case": size, "path": path, "bytes": case.moved}
    timed(op, made.calls, made.step, made.graphs)
