"""Time of a layer's decodes, prompts and mixed steps: `python -m pytest bench/test_attention.py --backends TRITON`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from .conftest import Timed
from .contenders import ALL, contenders
from .problem import Problem, make_problem
from .table import cases
from .timing import now

CASES = {f"{case.layer} {case.text}": case for case in cases("all", torch.cuda.is_available())}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A row for each step and contender; those of one step follow each other, since they share its problem."""
    names = [one.name for one in contenders(metafunc.config.getoption("--backends"))]
    metafunc.parametrize(("step", "backend"), [(step, name) for step in CASES for name in names])


@lru_cache(maxsize=1)
def problem_of(step: str) -> Problem:
    """It is large, and so is the float64 answer that it holds."""
    return make_problem(CASES[step])


@pytest.mark.benchmark(timer=now)
def test_attention(benchmark: Any, timed: Timed, step: str, backend: str) -> None:
    problem, case = problem_of(step), CASES[step]
    try:
        run = next(one for one in ALL if one.name == backend).run(problem)
    except Exception as error:  # whatever another library raises
        pytest.skip(f"{backend}: {error}")
    run.plan()
    error = problem.error(run.attend(0), run.block_size)
    benchmark.extra_info |= {"case": step, "path": backend, "error": error, "kernel": run.describe()}
    calls = [partial(run.attend, i) for i in range(problem.layers)]
    timed(f"paged_attention {case.suite}", calls, run.step, True)
