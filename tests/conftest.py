"""Triton runs interpreted where there is no GPU; that must be decided before its kernels are imported."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # the problems are tiny: a second thread only waits
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _use_the_checkout() -> None:
    """Make `pagedattn.engine` importable where nothing is installed (a GPU machine without a package index)."""
    folder = Path(__file__).parent.parent / "engine"
    spec = importlib.util.spec_from_file_location(
        "pagedattn.engine", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is not None and spec.loader is not None:
        sys.modules["pagedattn.engine"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if importlib.util.find_spec("pagedattn.engine") is None:
    _use_the_checkout()


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption("--grid", action="store_true", help="run full grids too, not only their covers")


def pytest_collection_modifyitems(config, items):  # type: ignore[no-untyped-def]
    if not config.getoption("--grid"):
        chosen = [item for item in items if item.get_closest_marker("grid") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
