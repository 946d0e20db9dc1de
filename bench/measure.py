"""One case, all contenders: checked against float64, captured, timed in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .contenders import Contender, beside_auto
from .latent_layer import peak_bytes
from .problem import Problem, make_problem
from .ratios import Row, add_ratios
from .run import Run
from .table import Case
from .timing import capture, host_us, time_replays

# Of a row; null where it has no meaning. `block_size` is the workload's, `cache_block_size` that of the caches read.
# Cases of a format have two more, `kv_cache_dtype`, the case's, and `cache_kv_dtype`, that of the caches read; random
# ones `draw`, by which they are drawn again; `window`, `softcap`, `sinks`, `dim_v` and `packed` are
# there where the case has them. Those of a latent layer have `new_tokens`, `keys`, and `peak_bytes`: device memory that
# one call takes at most, its output included.
FIELDS = (
    *("suite", "case", "workload", "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "backend"),
    *("us", "gb_s", "tflops", "tok_s", "copy_percent", "read_percent", "matmul_percent", "ratios", "ratio"),
    *("error", "plan_us", "host_us", "layers", "cache_block_size", "kernel", "refused"),
)

_ASKED = ("window", "softcap", "sinks", "dim_v", "packed", "draw")


def measure(
    case: Case,
    contenders: Sequence[Contender],
    ceilings: Mapping[str, float],
    tell: Callable[[str], object] = lambda name: None,
) -> list[Row]:
    """A row per contender; who cannot take part, or computes something else, has a reason in `refused` and no time.

    Args:
        ceilings: of this GPU, `timing.ceilings()`. tell: called with who comes next.
    """
    problem, contenders = make_problem(case), beside_auto(contenders, case)
    rows, replays, runs = [], {}, {}
    for one in contenders:
        tell(one.name)
        row = empty_row(case.suite, case.text, one.name) | _shape(case) | {"layers": problem.layers}
        rows.append(row)
        try:
            row |= _checked(run := one.run(problem), problem)
            runs[one.name] = run
            replays[one.name] = capture([partial(run.attend, i) for i in range(problem.layers)], run.step)
        except Exception as error:  # whatever another library raises; the others go on
            row["refused"] = reason(error)
    tell("timing")
    try:
        times = time_replays(replays, dict.fromkeys(replays, problem.layers)) if replays else {}
    except Exception as error:
        times = {}
        for row in rows:
            row["refused"] = row["refused"] or reason(error)
    for row in rows:
        if row["backend"] in times:
            row |= _speed(case, times[row["backend"]], runs[row["backend"]], ceilings)
    add_ratios(rows, [one.name for one in contenders if one.peer])
    return rows


def empty_row(suite: str, workload: str, backend: str) -> Row:
    """Every field, most of them null."""
    return {**dict.fromkeys(FIELDS), "suite": suite, "case": workload, "workload": workload, "backend": backend}


def reason(error: Exception) -> str:
    """One line of what went wrong."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return f"wrong: {text}" if isinstance(error, ArithmeticError) else text


def percent(value: float, ceilings: Mapping[str, float], name: str) -> float | None:
    """Of a ceiling, where there is one."""
    return round(100 * value / ceilings[name], 1) if name in ceilings else None


def _shape(case: Case) -> Row:
    stored = {} if case.kv_cache_dtype == "auto" else {"kv_cache_dtype": case.kv_cache_dtype, "cache_kv_dtype": None}
    return {
        "case": f"{case.layer} {case.text}",
        "num_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "head_dim": case.dim,
        "block_size": case.block_size,
        "dtype": case.dtype,
        **stored,
        **{name: getattr(case, name) for name in _ASKED if getattr(case, name)},
        **({"new_tokens": case.work.query_lens[0], "keys": case.work.seq_lens[0]} if case.by_layer else {}),
    }


def _checked(run: Run, problem: Problem) -> dict[str, Any]:
    run.plan()
    error = problem.error(run.attend(0), run.block_size, run.kv_cache_dtype, run.tolerance, run.own_cache)
    stored = {} if problem.case.kv_cache_dtype == "auto" else {"cache_kv_dtype": run.kv_cache_dtype}
    return {
        "error": error,
        "kernel": run.describe(),
        "cache_block_size": run.block_size,
        **stored,
        "plan_us": round(host_us(run.plan), 1),
        "host_us": round(host_us(partial(run.attend, 0)), 1),
        **({"peak_bytes": peak_bytes(partial(run.attend, 0))} if problem.case.by_layer else {}),
    }


def _bytes_read(case: Case, run: Run) -> int:
    if run.own_cache is None:
        return case.bytes_read(run.kv_cache_dtype)
    return case.work.keys_read(case.window) * run.own_cache.bytes_per_token


def _speed(case: Case, us: float, run: Run, ceilings: Mapping[str, float]) -> dict[str, Any]:
    gb_s = _bytes_read(case, run) / us / 1e3
    tflops = (case.flops if run.flops is None else run.flops) / us / 1e6
    return {
        "us": round(us, 3),
        "gb_s": round(gb_s, 1),
        "tflops": round(tflops, 2),
        "copy_percent": percent(gb_s, ceilings, "copy_gb_s"),
        "read_percent": percent(gb_s, ceilings, "read_gb_s"),
        "matmul_percent": percent(tflops, ceilings, "matmul_tflops"),
    }


def release() -> None:
    """Give the last case's memory back: the next one's tensors have other sizes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
