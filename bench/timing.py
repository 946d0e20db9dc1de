"""Time per call as a model runs it: one CUDA graph of many layers, each with data of its own, replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median microseconds per call. The calls together should touch far more than the L2 holds."""
    return time_together({"": calls}, repeats)[""]


def time_together(contenders: Mapping[str, Sequence[Callable[[], object]]], repeats: int = 20) -> dict[str, float]:
    """Median microseconds per call of each contender, their replays taking turns."""
    if not torch.cuda.is_available():
        return {name: _host_us(calls, repeats) for name, calls in contenders.items()}
    graphs = {name: _capture(calls) for name, calls in contenders.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    medians = {name: statistics.median(s.elapsed_time(e) for s, e in pairs[2:]) for name, pairs in events.items()}
    return {name: ms * 1e3 / len(contenders[name]) for name, ms in medians.items()}


def host_us(call: Callable[[], object], repeats: int = 50) -> float:
    """Median microseconds of host time that one eager call takes, the device's own time left out."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls as a model runs its layers: one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _host_us(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    times = []
    for _ in range(max(3, repeats // 4)):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
    return statistics.median(times) * 1e6


def ceilings() -> dict[str, float]:
    """What this GPU does at best: copy (read + write) and read in GB/s, bf16 matrix product in TFLOP/s."""
    if not torch.cuda.is_available():
        return {}
    big = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    half = big[: 1 << 30], big[1 << 30 :]
    read = time_us([lambda: big.view(torch.int32).amax()] * 4, 10)
    # A kernel, not copy_: in a graph that becomes a memcpy node, which reaches two thirds of it.
    copy = time_us([lambda: torch.neg(half[1], out=half[0])] * 4, 10)
    x, y = (big[i << 26 : (i + 1) << 26].view(8192, 8192) for i in range(2))
    product = time_us([lambda: x @ y] * 4, 10)
    return {
        "copy_gb_s": round(2 * half[0].nbytes / copy / 1e3, 1),
        "read_gb_s": round(big.nbytes / read / 1e3, 1),
        "matmul_tflops": round(2 * 8192**3 / product / 1e6, 1),
    }
