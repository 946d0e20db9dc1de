"""Time per call as a model runs it: one CUDA graph of many layers, each with data of its own, replayed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

Calls = Sequence[Callable[[], object]]
_SECONDS = 0.3  # of replays per contender
_FEWEST, _MOST = (15 if torch.cuda.is_available() else 5), 400  # replays; on a CPU one may take a second
_FLUSH_BYTES = 1 << 28  # written between replays where they shall find an L2 cache without their data


def time_us(calls: Calls) -> float:
    """Median microseconds per call. The calls together should touch far more than the L2 holds."""
    return time_replays({"": capture(calls)}, {"": len(calls)})[""]


def capture(calls: Calls, step: Callable[[], object] | None = None) -> Callable[[], object]:
    """What runs `step` once and then the calls, as a model runs its layers: one CUDA graph (plain calls on a CPU)."""

    def run() -> None:
        if step is not None:
            step()
        for call in calls:
            call()

    if not torch.cuda.is_available():
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _keep: Callable[[], None]) -> None:
    """Whatever was captured reads memory that only the captured calls keep alive."""
    graph.replay()


def time_replays(
    replays: Mapping[str, Callable[[], object]],
    calls: Mapping[str, int],
    rounds: int | None = None,
    seconds: float | None = None,
    flush: bool = False,
) -> dict[str, float]:
    """Median microseconds of each replay over its number of calls; the replays take turns, in orders of `_orders`.

    `rounds`: how many turns each has; None is as many as take `seconds` (None: `_SECONDS`) of each, within bounds.
    `flush`: the L2 cache before every turn.
    """
    names = [*replays]
    for name in names:
        replays[name]()  # the first replay of a graph uploads it
    if rounds is None:
        once = sum(elapsed_us([replays[name] for name in names], flush))
        seconds = _SECONDS if seconds is None else seconds
        rounds = min(max(int(seconds * 1e6 * len(names) / max(once, 1.0)), _FEWEST), _MOST)
    times: dict[str, list[float]] = {name: [] for name in names}
    orders = _orders(len(names))
    order = [names[i] for turn in range(rounds) for i in orders[turn % len(orders)]]
    for name, us in zip(order, elapsed_us([replays[name] for name in order], flush), strict=True):
        times[name].append(us)
    return {name: statistics.median(some) / calls[name] for name, some in times.items()}


def _orders(n: int) -> list[list[int]]:
    """Rounds of n turns in which each follows every other equally often: n of them, 2 n where n is odd.

    A kernel that runs after one that left the GPU cool has a higher clock: none may always follow the same other.
    Source: E. J. Williams, "Experimental designs balanced for the estimation of residual effects", 1949.
    """
    zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(n)]
    rounds = [[(first + step) % n for step in zigzag] for first in range(n)]
    return rounds + [one[::-1] for one in rounds] if n % 2 else rounds


def elapsed_us(replays: Sequence[Callable[[], object]], flush: bool = False) -> list[float]:
    """Microseconds of each, one enqueued after the other; `flush` the L2 cache before each, which is not counted."""
    if not torch.cuda.is_available():
        return [_wall_us(replay) for replay in replays]
    events = []
    for replay in replays:
        if flush:
            flush_l2()
        start = _event()
        replay()
        events.append((start, _event()))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def stream_us(call: Callable[[], object], repeats: int = 20, seconds: float = 0.1) -> float:
    """Microseconds per call, many enqueued one after the other: what the device takes, unless the host takes longer.

    As many as take `seconds`, at least 2 and at most `repeats`.
    """
    if not torch.cuda.is_available():
        return host_us(call, repeats, seconds)
    call()
    (once,) = elapsed_us([call])
    repeats = max(2, min(repeats, int(seconds * 1e6 / max(once, 1.0))))
    return elapsed_us([lambda: [call() for _ in range(repeats)]])[0] / repeats


class Instant(NamedTuple):
    """A point in the order of the GPU's stream. What an `Instant` itself enqueues lies between its two events."""

    before: torch.cuda.Event
    after: torch.cuda.Event

    def __sub__(self, earlier: Instant) -> float:
        """Seconds that the GPU took for what was enqueued between; waits for it."""
        self.before.synchronize()
        return earlier.after.elapsed_time(self.before) * 1e-3


def now() -> Any:
    """A timer for pytest-benchmark: `end - start` are seconds of the GPU's own time, on a CPU of the wall's.

    The L2 cache is flushed in each `now`, and the host enqueues what comes next meanwhile: its time is not counted.
    """
    if not torch.cuda.is_available():
        return time.perf_counter()
    before = _event()
    flush_l2()
    return Instant(before, _event())


def in_turns(replay: Callable[[], object], calls: int) -> Callable[[], object]:
    """`calls` calls of it are one replay of as many captured calls: who divides by their number has the time of one."""
    turns = itertools.cycle([replay, *[_nothing] * (calls - 1)])
    return lambda: next(turns)()


def _nothing() -> None:
    pass


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def flush_l2() -> None:
    """Write far more than an L2 cache holds."""
    _flushed().zero_()


@cache
def _flushed() -> torch.Tensor:
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def host_us(call: Callable[[], object], repeats: int = 50, seconds: float = 0.02) -> float:
    """Median microseconds of host time that one eager call takes, the device's own time left out.

    At least 5 calls; of slow ones no more than fit into `seconds`, the device's time counted.
    """
    times, begun = [], time.perf_counter()
    while len(times) < 5 or (len(times) < repeats and time.perf_counter() - begun < seconds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(_wall_us(call))
    return statistics.median(times)


def _wall_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def ceilings() -> dict[str, float]:
    """What this GPU does at best: copy (read + write) and read in GB/s, bf16 matrix product in TFLOP/s."""
    if not torch.cuda.is_available():
        return {}
    big = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    half = big[: 1 << 30], big[1 << 30 :]
    read = time_us([lambda: big.view(torch.int32).amax()] * 4)
    # A kernel, not copy_: in a graph that becomes a memcpy node, which reaches two thirds of it.
    copy = time_us([lambda: torch.neg(half[1], out=half[0])] * 4)
    x, y = (big[i << 26 : (i + 1) << 26].view(8192, 8192) for i in range(2))
    product = time_us([lambda: x @ y] * 4)
    return {
        "copy_gb_s": round(2 * half[0].nbytes / copy / 1e3, 1),
        "read_gb_s": round(big.nbytes / read / 1e3, 1),
        "matmul_tflops": round(2 * 8192**3 / product / 1e6, 1),
    }
