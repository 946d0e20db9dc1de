"""Which path of each op is fastest at which size: csrc, Triton and torch take turns, in one run.

    python3 -m bench.op_paths [--json FILE] [--only OP] [--seconds 0.08] [--limit 55]

Each result is checked first. `us` is the kernel time: on a GPU one CUDA graph of many layers, the L2 cache flushed
before each replay; on a CPU the wall's. `host_us` is what one eager call takes the host, `stream_us` what each of many
takes that are enqueued one after the other. Calls that send host tensors first, and so are in no graph, have that as
their `us` too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pagedattn.bench.measure import empty_row, percent, reason, release
from pagedattn.bench.op_problems import GPU, OpCalls
from pagedattn.bench.op_table import OpCase, default_of, op_cases, paths_of
from pagedattn.bench.ratios import Row
from pagedattn.bench.report import ResultFile
from pagedattn.bench.timing import capture, ceilings, host_us, stream_us, time_replays

PATHS = ("csrc", "triton", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, print a line for each, write the file.

    Returns:
        0; 1 where a path computed something wrong or nothing could be timed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", default="", help="ops whose name has this in it")
    parser.add_argument("--seconds", type=float, default=0.08, help="of replays for each path of each case")
    parser.add_argument("--limit", type=float, default=55.0, help="seconds after which no further case begins")
    options = parser.parse_args(argv)
    begun, result = time.perf_counter(), ResultFile(options.json, {}, [])
    limits = ceilings()
    result.meta |= limits | {"threads": torch.get_num_threads()}
    print(f"{'':50}" + "".join(f"{path + ' us':>12}{'(host)':>10}" for path in PATHS) + "  default, fastest")
    cases = [case for case in op_cases() if options.only in case.op]
    for done, case in enumerate(cases):
        if time.perf_counter() - begun > options.limit:
            print(f"--limit: {len(cases) - done} cases left out, from {case.op} {case.size} on")
            break
        rows = measure(case, options.seconds)
        for row in rows:
            if row["us"] is not None:
                row["copy_percent"] = percent(row["gb_s"], limits, "copy_gb_s")
        result.add(rows)
        print(line(case, rows), flush=True)
        release()
    wrong = any(str(row["refused"]).startswith("wrong") for row in result.rows)
    return int(wrong or not any(row["us"] for row in result.rows))


def measure(case: OpCase, seconds: float) -> list[Row]:
    """A row for each path; one that fails says why in `refused`, and the others go on."""
    rows, replays, layers = [], {}, {}
    for path in paths_of(case):
        row = empty_row("ops", case.size, path) | {"case": f"{case.op}, {case.size}", "op": case.op}
        row |= {"default": default_of(case), "timed": None, "stream_us": None}
        rows.append(row)
        try:
            made = case.make(path)
            made.check()
            row |= {"host_us": round(host_us(made.calls[0]), 1), "stream_us": round(stream_us(made.calls[0]), 2)}
            row["timed"], replay = _replay(made)
            if replay is None:
                _set_time(row, case, row["stream_us"])
                continue
            replay()
            row["layers"], replays[path], layers[path] = len(made.calls), replay, len(made.calls)
        except Exception as error:  # one path's failure is not the end of the others
            row["refused"] = reason(error)
    try:
        times = time_replays(replays, layers, seconds=seconds, flush=True) if replays else {}
    except Exception as error:
        times = {}
        for row in rows:
            if row["backend"] in replays:
                row["refused"] = reason(error)
    for row in rows:
        if row["backend"] in times:
            _set_time(row, case, times[row["backend"]])
    return rows


def _replay(made: OpCalls) -> tuple[str, Callable[[], object] | None]:
    """How it is timed, and what replays the calls; None where they are enqueued one after the other."""
    if not GPU:
        return "wall", capture(made.calls, made.step)
    if not made.graphs:
        return "stream", None
    try:
        return "graph", capture(made.calls, made.step)
    except Exception as error:  # whatever the capture of an op raises
        torch.cuda.synchronize()
        return f"stream: {reason(error)}", None


def _set_time(row: Row, case: OpCase, us: float) -> None:
    row |= {"us": round(us, 3), "gb_s": round(case.moved / us / 1e3, 1)}


def fastest(rows: Sequence[Row]) -> str | None:
    """The path that takes the least time: in graphs where all of them can be in one, else enqueued."""
    timed = [row for row in rows if row["us"] is not None]
    field = "us" if len({str(row["timed"]).partition(":")[0] for row in timed}) == 1 else "stream_us"
    return min(timed, key=lambda row: row[field])["backend"] if timed else None


def line(case: OpCase, rows: Sequence[Row]) -> str:
    """Microseconds of each path, the host's in brackets, `~` where no graph holds it; then the default and the best."""
    cells, found = [], {row["backend"]: row for row in rows}
    for path in PATHS:
        row = found.get(path)
        if row is None or row["us"] is None:
            cells.append(f"{'-' if row is None else 'refused':>12}{'':10}")
            continue
        mark = "~" if str(row["timed"]).startswith("stream") else ""
        cells.append(f"{mark + format(row['us'], '.2f'):>12}{'(' + format(row['host_us'], '.1f') + ')':>10}")
    best, usual = fastest(rows), default_of(case)
    verdict = usual if best == usual else f"{usual}, {best}"
    refused = "".join(f"\n    {path}: {row['refused']}" for path, row in found.items() if row["refused"])
    return f"{case.op + ', ' + case.size:50}" + "".join(cells) + f"  {verdict}{refused}"


if __name__ == "__main__":
    raise SystemExit(main())
