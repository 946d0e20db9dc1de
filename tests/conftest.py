"""Triton runs interpreted where there is no GPU; that must be decided before its kernels are imported."""

import os

import torch

torch.set_num_threads(1)  # the problems are tiny: a second thread only waits
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from pagedattn import checkout  # noqa: E402

for part in ("engine", "bench"):
    checkout.load(part)

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.make_order_stable()


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption("--grid", action="store_true", help="run full grids too, not only their covers")
    parser.addoption("--problems", type=int, default=250, help="how many random problems of TRITON to draw on a GPU")


def pytest_collection_modifyitems(config, items):  # type: ignore[no-untyped-def]
    if not config.getoption("--grid"):
        chosen = [item for item in items if item.get_closest_marker("grid") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
