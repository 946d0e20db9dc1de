"""Run: how a contender plans a step and attends in a layer, and over which caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class OwnCache(NamedTuple):
    """A cache in a format that this library does not have.

    `rows`: of a sequence, a KV head and a number of its tokens, the keys and values, each float64 [tokens, 1, D], that
    layer 0 stands for. `bytes_per_token`: of a layer, what attention reads of them.
    """

    rows: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
    bytes_per_token: int


class Run(NamedTuple):
    """A contender with one problem's data.

    `plan`: the host's work once per step, outside a graph. `step`: the device's work once per step, inside. `attend`: a
    layer's output [T, Hq, D]. `describe`: which kernels those are. `block_size`, `kv_cache_dtype`: of its caches.
    `tolerance`: a relative error that is right for it, however exact a naive implementation is. `own_cache`: what it
    reads, where that is not in a format of this library; then `kv_cache_dtype` is another library's name of it.
    `flops`: of its products, where they are not the case's.
    """

    plan: Callable[[], object]
    step: Callable[[], object] | None
    attend: Callable[[int], torch.Tensor]
    describe: Callable[[], str]
    block_size: int
    kv_cache_dtype: str = "auto"
    tolerance: float = 0.0
    own_cache: OwnCache | None = None
    flops: float | None = None
