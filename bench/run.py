"""Run: how a contender plans a step and attends in a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """A contender with one problem's data.

    `plan`: the host's work once per step, outside a graph. `step`: the device's work once per step, inside. `attend`: a
    layer's output [T, Hq, D]. `describe`: which kernels those are. `block_size`: of its caches.
    """

    plan: Callable[[], object]
    step: Callable[[], object] | None
    attend: Callable[[int], torch.Tensor]
    describe: Callable[[], str]
    block_size: int
