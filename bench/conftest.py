"""Options of the benchmarks, and the result file: one JSON object of meta and rows."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import ceilings

import pagedattn

FIELDS = (
    *("suite", "workload", "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "backend"),
    *("us", "gb_s", "tflops", "tok_s", "error", "host_us", "plan_us"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result", default=None, help="write rows to this JSON file")
    parser.addoption("--backends", default=None, help="comma-separated names; all that are available where not given")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest):
    """Rows of this run; written with the machine's facts when the run ends."""
    rows: list[dict[str, object]] = []
    yield rows
    path = request.config.getoption("--result")
    if path and rows:
        rows = [{**dict.fromkeys(FIELDS), **row} for row in rows]
        Path(path).write_text(json.dumps({"meta": _meta(), "rows": rows}, indent=1) + "\n")


def _meta() -> dict[str, object]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "pagedattn": pagedattn.__version__,
        "backends": pagedattn.list_backends(),
        "commit": os.environ.get("COMMIT", "unknown"),
        "date": datetime.date.today().isoformat(),
        **ceilings(),
    }
