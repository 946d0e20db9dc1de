"""Where a step's time goes: on the host by part, and on the GPU by kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from pagedattn.engine import LLM

PARTS = ("schedule", "pack", "launch", "read", "update", "report")
_KERNELS = 12
_SCHEDULER = {"schedule": "schedule", "advance_with_placeholders": "update", "apply_tokens": "update"}


class HostClock:
    """Time of an engine's parts, what a part calls of another not counted twice. `read` waits for the device."""

    def __init__(self, llm: LLM) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        scheduler, runner = llm._scheduler, llm.runner
        self._wrapped: list[tuple[Any, str]] = []
        for owner, names in (
            (scheduler, _SCHEDULER),
            (runner, {"launch": "launch"}),
            (runner._builder, {"pack": "pack"}),
            (llm, {"_report": "report"}),
        ):
            for name, part in names.items():
                if hasattr(owner, name):
                    self._wrap(owner, name, part)

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        called = getattr(owner, name)

        @wraps(called)
        def timed(*args: Any, **options: Any) -> Any:
            out = self._timed(part, lambda: called(*args, **options))
            if name == "launch" and hasattr(out, "read"):
                self._wrap(out, "read", "read")
            return out

        setattr(owner, name, timed)
        if name != "read":
            self._wrapped.append((owner, name))

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            return call()
        finally:
            spent = time.perf_counter() - start
            self.seconds[part] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def close(self) -> None:
        """Leave the engine as it was."""
        for owner, name in self._wrapped:
            delattr(owner, name)


@contextmanager
def host_clock(llm: LLM) -> Iterator[HostClock]:
    """Time the parts of an engine while this is open."""
    clock = HostClock(llm)
    try:
        yield clock
    finally:
        clock.close()


def gpu_time(turn: Callable[[], object], turns: int) -> dict[str, Any]:
    """Of turns under the profiler: the share of time in which a kernel ran, and the kernels with most time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(turns):
            turn()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    spent: defaultdict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            spans.append((event.time_range.start, event.time_range.end))
            spent[event.name] += event.time_range.elapsed_us()
    busy, wall = _covered(spans)
    names = sorted(spent, key=lambda name: -spent[name])[:_KERNELS]
    return {
        "gpu_busy": round(busy / wall, 4) if wall else None,
        "gpu_ms_per_step": round(busy / turns / 1e3, 4),
        "kernels_per_step": round(len(spans) / turns, 1),
        "kernels": {name[:90]: round(spent[name] / turns, 2) for name in names},  # us per step
    }


def _covered(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Time that the spans cover together, and that from the first to the last."""
    if not spans:
        return 0.0, 0.0
    spans = sorted(spans)
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered, until - spans[0][0]
