"""Options of the benchmarks under pytest, and the result file that `pagedattn bench` writes as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from .contenders import contenders
from .report import ResultFile
from .timing import ceilings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result", default=None, help="write rows to this JSON file")
    parser.addoption("--backends", default=None, help="comma-separated names; all that are available where not given")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> ResultFile:
    """Rows of this run, written with the machine's facts as they come."""
    path = request.config.getoption("--result")
    chosen = contenders(request.config.getoption("--backends"))
    return ResultFile(None if path is None else Path(path), ceilings(), chosen)
