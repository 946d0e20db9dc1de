"""Triton runs interpreted where there is no GPU; that must be decided before its kernels are imported."""

import gc
import os
from importlib.util import find_spec

import pytest
import torch

torch.set_num_threads(1)  # the problems are tiny: a second thread only waits
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import covers  # noqa: E402
import interpreter  # noqa: E402
import random_work  # noqa: E402
import uninterpreted  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    interpreter.make_order_stable()
    interpreter.check_options()
    interpreter.make_fast()


@pytest.fixture(scope="session", autouse=True)
def _folder_of_the_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    uninterpreted.folder = own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_stays() -> None:
    """Leave out of garbage collection what is imported and collected by now, which each full one would go through."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption(
        "--grid", action="store_true", help="run full grids and all random work, not only covers and parts"
    )
    parser.addoption("--every-case", action="store_true", help="of tests with a `cover` run all cases")
    parser.addoption("--problems", type=int, default=250, help="how many random problems of TRITON to draw on a GPU")
    parser.addoption("--random-seed", type=int, default=0, help="of what those are drawn by")
    parser.addoption("--random-part", default="1/1", help="one part of those alone, such as 2/4")
    parser.addoption("--problem", action="append", default=[], help="one of those alone, KIND:SEED/INDEX")


def pytest_configure(config):  # type: ignore[no-untyped-def]
    random_work.everything = config.getoption("--grid")


def pytest_collection_modifyitems(config, items):  # type: ignore[no-untyped-def]
    # xdist's worksteal takes tests from the end of another process's: those first share their ranks in one process.
    items.sort(key=lambda item: item.path.name != "test_tensor_parallel.py")
    if config.getoption("--grid"):
        return
    left = {item for item in items if item.get_closest_marker("grid") is not None}
    every = config.getoption("--every-case") or torch.cuda.is_available()  # not interpreted, a case takes milliseconds
    if not every:
        left |= covers.left_to_grid(item for item in items if item not in left)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
