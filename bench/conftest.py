"""pytest-benchmark's numbers here are an op's own time: `python -m pytest bench --benchmark-only`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from .measure import release
from .timing import capture, in_turns, now

_SECONDS = 0.2 if torch.cuda.is_available() else 0.05  # of rounds for each row
_FEWEST, _MOST = 5, 100

Timed = Callable[[str, Sequence[Callable[[], object]], Callable[[], object] | None, bool], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default=None, help="comma-separated names; all that are available where not given")


@pytest.fixture
def timed(benchmark) -> Iterator[Timed]:  # type: ignore[no-untyped-def]
    """Have calls timed that were checked before: `timed(op, calls, step, graphs)`, as `op_problems.OpCalls` has them.

    A round is one replay of all calls, and `Iterations` is how many those are, so that the table has the time of one:
    on a GPU the kernels' in a CUDA graph, or the stream's where no graph can hold the calls; on a CPU the wall's. The
    group says which of these it is.
    """

    def run(op: str, calls: Sequence[Callable[[], object]], step: Callable[[], object] | None, graphs: bool) -> None:
        gpu = torch.cuda.is_available()
        how = "CUDA graph" if gpu and graphs else "stream, with the host's part" if gpu else "wall time"
        replay = capture(calls, step) if graphs else lambda: [call() for call in calls]
        replay()
        benchmark.group = f"{op} ({how})"
        benchmark.extra_info |= {"op": op, "timed": how, "calls_per_round": len(calls)}
        start = now()
        replay()
        rounds = min(max(int(_SECONDS / max(now() - start, 1e-6)), _FEWEST), _MOST)
        benchmark.pedantic(in_turns(replay, len(calls)), rounds=rounds, iterations=len(calls), warmup_rounds=1)

    yield run
    if torch.cuda.is_available():
        release()
