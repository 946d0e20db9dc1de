"""TPGroup that are threads of one process, so that a model can be cut into many parts without starting any process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class ThreadRanks:
    """One rank of a group of threads; `counts` has how often it called each collective."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, held: list[object]) -> None:
        self.rank, self.size, self._meeting, self._held = rank, size, meeting, held
        self.counts = {"all_reduce": 0, "all_gather": 0}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As `TPGroup.all_reduce`."""
        self.counts["all_reduce"] += 1
        total = torch.stack(self._exchange(x.clone())).sum(0)
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As `TPGroup.all_gather`."""
        self.counts["all_gather"] += 1
        return torch.stack(self._exchange(x))

    def smallest(self, value: int) -> int:
        """As `TPGroup.smallest`."""
        return min(self._exchange(value))

    def _exchange(self, value: object) -> list:
        self._held[self.rank] = value
        self._meeting.wait(timeout=60)
        values = list(self._held)
        self._meeting.wait(timeout=60)
        return values


def on_ranks(size: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """What `work` returns on each of `size` ranks, which run at the same time."""
    meeting, held = threading.Barrier(size), list[object]([None] * size)

    def guarded(rank: int) -> Result:
        try:
            return work(ThreadRanks(rank, size, meeting, held))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
