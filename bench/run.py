"""Run: how a contender plans a step and attends in a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """A contender with one problem's data.

    `plan`: the host's work once per step, outside a graph. `step`: the device's work once per step, inside. `attend`: a
    layer's output [T, Hq, D]. `describe`: which kernels those are. `block_size`, `kv_cache_dtype`: of its caches.
    `tolerance`: a relative error that is right for it, however exact a naive implementation is.
    """

    plan: Callable[[], object]
    step: Callable[[], object] | None
    attend: Callable[[int], torch.Tensor]
    describe: Callable[[], str]
    block_size: int
    kv_cache_dtype: str = "auto"
    tolerance: float = 0.0
