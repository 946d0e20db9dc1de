"""`pagedattn bench engine`: output tokens per second of whole workloads, and where a step's time goes."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedattn.engine import LLM
from pagedattn.errors import InvalidInputError, PagedAttnError

from .engine_cases import EngineCase, engine_cases
from .engine_clock import PARTS, gpu_time, host_clock
from .measure import reason, release
from .ratios import Row
from .report import Progress, ResultFile

_RUNS = 3
_PROFILED, _BEFORE = 40, 60  # turns under the profiler, and turns before them


def run(backend: str | None, names: Sequence[str], json: Path | None, kv_cache_dtypes: Sequence[str] = ()) -> int:
    """Measure all cases, or those of these names, and report. With `kv_cache_dtypes`, each over caches of each of
    these formats, and none that has a format of its own.

    Returns:
        0, or 1 where a case could not be run.

    Raises:
        InvalidInputError: an unknown name.
    """
    known = engine_cases(torch.cuda.device_count())
    unknown = set(names) - {case.name for case in known}
    if unknown:
        expected = f"one of {', '.join(dict.fromkeys(case.name for case in known))}"
        raise InvalidInputError("--workload", expected, sorted(unknown))
    todo = [case for case in known if not names or case.name in names]
    if kv_cache_dtypes:
        plain = [case for case in todo if "kv_cache_dtype" not in case.options]
        todo = [case if name == "auto" else case.over(name) for case in plain for name in kv_cache_dtypes]
    progress, result = Progress(len(todo), json), ResultFile(json, {}, [])
    for case in todo:
        progress.tell(f"{case.model} {case.name}")
        row = measure(case, backend)
        result.add_plain(row)
        progress.done += 1
        for text in lines(row):
            progress.say(text)
    result.print_json()
    return int(any(row["refused"] for row in result.rows))


def measure(case: EngineCase, backend: str | None) -> Row:
    """A case, warm: the median of three runs; then a run whose parts are timed, and a piece of one under a profiler."""
    row: Row = {"suite": "engine", "workload": case.name, "model": case.model, "backend": backend or "auto"}
    row |= {"options": dict(case.options), "refused": None}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            llm = LLM(case.write(Path(folder)), load_format="dummy", backend=backend, **case.options)
            row["start_up_s"] = round(time.perf_counter() - start, 2)
            row |= _timed(llm, case) | parts(llm, case)
            llm.close()
        except PagedAttnError as error:
            row["refused"] = reason(error)
        llm = None
    gc.collect()
    release()
    return row


def lines(row: Row) -> list[str]:
    """A row as text: the result, then where the time goes."""
    title = f"{row['model']} {row['workload']} ({row['backend']})"
    if row["refused"]:
        return [f"{title}: refused: {row['refused']}"]
    text = f"{title}: {row['tok_s']:.0f} output tokens/s in {row['seconds']:.2f} s"
    text += f", {row['steps']} steps of {row['step_ms']:.2f} ms, start-up {row['start_up_s']:.1f} s"
    counts = ("preemptions", "cached_tokens", "dropped_tokens", "replays")
    host = ", ".join(f"{part} {ms:.3f}" for part, ms in row["host_ms"].items())
    out = [text, f"  {', '.join(f'{name} {row[name]}' for name in counts)}", f"  host ms a step: {host}"]
    if row.get("gpu_busy") is not None:
        out.append(
            f"  GPU busy {100 * row['gpu_busy']:.1f}% of {row['profiled']} steps, {row['gpu_ms_per_step']:.2f} ms and "
            f"{row['kernels_per_step']:.0f} kernels a step"
        )
        out += [f"    {us:9.1f} us  {name}" for name, us in row["kernels"].items()]
    return out


def _timed(llm: LLM, case: EngineCase) -> dict[str, Any]:
    prompts, params = case.requests()
    llm.generate(prompts[:2], params[:2], progress=False)  # compiles what is not captured
    seconds, before = [], llm.stats().counters
    for index in range(_RUNS + 1):
        llm.reset_prefix_cache()
        before = llm.stats().counters
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        if index:  # the first run is for warming up
            seconds.append(time.perf_counter() - start)
    after, middle = llm.stats().counters, statistics.median(seconds)
    steps, tokens = after.steps - before.steps, sum(len(output.token_ids) for output in outputs)
    graphs = getattr(llm.runner, "_graphs", None)
    first = [output.time_to_first_token for output in outputs if output.time_to_first_token is not None]
    return {
        "seconds": round(middle, 4),
        "all_seconds": [round(one, 4) for one in seconds],
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "tok_s": round(tokens / middle, 1),
        "steps": steps,
        "step_ms": round(1e3 * middle / steps, 4),
        "first_token_ms": round(1e3 * statistics.median(first), 3),
        "preemptions": after.preemptions - before.preemptions,
        "cached_tokens": after.cached_tokens - before.cached_tokens,
        "dropped_tokens": after.dropped_tokens - before.dropped_tokens,
        "replays": 0 if graphs is None else graphs.replays,
    }


def parts(llm: LLM, case: EngineCase) -> dict[str, Any]:
    """Host time by part over a whole run; then the GPU's, in the middle of another, where it is this process's."""
    prompts, params = case.requests()
    llm.reset_prefix_cache()
    before, start = llm.stats().counters.steps, time.perf_counter()
    with host_clock(llm) as clock:
        llm.generate(prompts, params, progress=False)
    steps, wall = llm.stats().counters.steps - before, time.perf_counter() - start
    host = {part: round(1e3 * clock.seconds[part] / steps, 4) for part in PARTS if part in clock.seconds}
    host["other"] = round(1e3 * wall / steps - sum(host.values()), 4)
    out: dict[str, Any] = {"host_ms": host}
    if not torch.cuda.is_available() or "tensor_parallel_size" in case.options:
        return out
    names = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for _ in range(_BEFORE):
        llm.step()
    out |= {"profiled": _PROFILED, **gpu_time(llm.step, _PROFILED)}
    for name in names:
        llm.abort(name)
    llm.step()
    return out
