"""`pagedattn bench`: measure a suite, print a line per row, and write and draw what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pagedattn.errors import InvalidInputError
from pagedattn.formats.mla_rows.format import LATENT_DTYPES
from pagedattn.formats.per_layer import KVCacheDtype
from pagedattn.formats.registry import FORMATS as CACHE_FORMATS
from pagedattn.formats.registry import format_of

from . import cache_ops
from .contenders import by_own_kernels, contenders
from .measure import measure, release
from .random_shapes import random_cases, seeds_of
from .ratios import BEHIND, JUDGED, Row, judged_ratio
from .report import Progress, ResultFile, header, line, summary_lines
from .table import FORMATS, LATENT, NO_ATTENTION, RANDOM, SUITES, Case, case_of, cases, latent_cases
from .timing import ceilings

_CASES = 20  # random ones, if no number is given


def run(
    suite: str,
    backends: str | None,
    workloads: Sequence[str],
    json: Path | None,
    plot: bool,
    kv_cache_dtypes: Sequence[str] = (),
    seed: int | None = None,
    count: int | None = None,
    heads: Sequence[int] = (),
    commit: str | None = None,
) -> int:
    """Measure and report. `json` is a file for meta and rows, or `report.STDOUT`; then lines go to standard error.

    Each case of attention or of the engine is measured over caches of each of the formats `kv_cache_dtypes`; without
    any, of "auto", of the suite FORMATS over all others, and those of the engine and of RANDOM as they are. seed,
    count: of the suite RANDOM, by default 0 and 20; commit: in place of a seed the full hash of one, of whose five
    seeds (`random_shapes.seeds_of`) so many cases each are measured. Where TRITON is behind a peer by 5 % the case is
    measured three times, and the run with the median of its ratio counts. heads: of the suite LATENT, which of its
    cases are measured, or a workload's heads; without any, all.

    Returns:
        0; 1 where kernels of this library computed something wrong, or nothing could be timed. A wrong result of
        another library is a row that says so: its build may be to blame (some of flash-attn compute garbage for head
        dims that they leave out), and the others' results hold.

    Raises:
        InvalidInputError: an unknown suite, contender or format, a format for a suite without attention, a workload of
            another grammar, a file that cannot be written, or no matplotlib for `plot`.
    """
    formats = _formats_of(suite, kv_cache_dtypes, workloads)
    _check_options(suite, seed, count, heads, commit, plot)
    if suite == "engine":
        from . import engine_bench

        return engine_bench.run(backends, workloads, json, formats)
    gpu = torch.cuda.is_available()
    chosen = contenders(backends, suite)
    seeds, count = seeds_of(commit) if commit is not None else [seed or 0], _CASES if count is None else count
    plain = _plain_cases(suite, workloads, gpu, seeds, count, heads)
    taken = [case for case in plain if any(one.takes(case) for one in chosen)]
    todo = [case._replace(kv_cache_dtype=name) for case in taken for name in formats or [case.kv_cache_dtype]]
    with_cache = not workloads and suite in ("cache", "all")
    progress = Progress(len(todo) + with_cache * len(cache_ops.OPS), json)
    result = ResultFile(json, {}, chosen)
    progress.tell("ceilings of this machine")
    limits = ceilings()
    result.meta |= limits | (_drawn(seeds, count, commit) if suite == RANDOM else {})
    progress.say(header(suite))

    def told(rows: list[Row]) -> None:
        progress.done += 1
        result.add(rows)
        for row in rows:
            progress.say(line(row))
        release()

    for case in todo:
        some = [one for one in chosen if one.takes(case)]
        once = partial(measure, case, some, limits, lambda name, case=case: progress.tell(_title(case, name)))
        told(median_of_three(once) if suite == RANDOM else once())
    if with_cache:
        for rows in cache_ops.measure(limits, progress.tell):
            told(rows)
    return _finish(result, limits, progress, json, plot)


def _finish(result: ResultFile, limits: Mapping[str, float], progress: Progress, json: Path | None, plot: bool) -> int:
    """The last lines, the pictures, and the exit status."""
    for text in [*(f"{name} {value}" for name, value in limits.items()), *summary_lines(result.meta)]:
        progress.say(text)
    if plot:
        from .plot import draw_all
        from .result_file import Result

        folder = (json.parent if json is not None else Path()) / "plots"
        for path in draw_all(Result(result.meta, result.rows), folder):
            progress.say(str(path))
    result.print_json()
    wrong = any(str(row["refused"]).startswith("wrong") and by_own_kernels(row) for row in result.rows)
    return int(wrong or not any(row["us"] for row in result.rows))


def _plain_cases(
    suite: str, workloads: Sequence[str], gpu: bool, seeds: Sequence[int], count: int, heads: Sequence[int]
) -> list[Case]:
    """What is measured, before formats."""
    if suite == LATENT:
        return latent_cases(workloads, heads, gpu)
    if workloads:
        return [case_of(text, gpu) for text in workloads]
    if suite == RANDOM:
        return [case for seed in seeds for case in random_cases(seed, count, gpu)]
    return cases(suite, gpu)


def _drawn(seeds: Sequence[int], count: int, commit: str | None) -> dict[str, Any]:
    """What the file says of random cases: `cases` are those of each seed."""
    return {"seeds": [*seeds], "cases": count} | ({} if commit is None else {"seeds_of": commit})


def _check_options(
    suite: str, seed: int | None, count: int | None, heads: Sequence[int], commit: str | None, plot: bool
) -> None:
    if suite != RANDOM and (seed, count, commit) != (None, None, None):
        expected = f"used with the suite {RANDOM}"
        raise InvalidInputError("--seed, --seeds-of and --cases", expected, f"the suite {suite}")
    if seed is not None and commit is not None:
        raise InvalidInputError("--seed", "left out with --seeds-of", str(seed), "pass one of the two")
    if heads and suite != LATENT:
        raise InvalidInputError("--heads", f"used with the suite {LATENT}", f"the suite {suite}")
    if count is not None and count < 1:
        raise InvalidInputError("--cases", "a positive integer", str(count))
    if plot and suite != "engine" and find_spec("matplotlib") is None:
        raise InvalidInputError("--plot", "used where matplotlib is", "none", "pip install pagedattn[bench]")


def _formats_of(suite: str, given: Sequence[str], workloads: Sequence[str]) -> list[str]:
    """As `_formats`; raises InvalidInputError for a suite, or a format that it does not have."""
    if suite not in SUITES:
        raise InvalidInputError("suite", f"one of {', '.join(SUITES)}", repr(suite))
    formats = _formats(suite, given)
    if suite in NO_ATTENTION and suite != "engine" and not workloads and {*formats} - {"auto"}:
        raise InvalidInputError("--kv-cache-dtype", "used with a suite of attention or engine", f"the suite {suite}")
    if suite == LATENT and {*formats} - {*LATENT_DTYPES}:
        served = f"of {', '.join(LATENT_DTYPES)} over latent rows"
        raise InvalidInputError("--kv-cache-dtype", served, ", ".join(formats))
    return formats


def _formats(suite: str, given: Sequence[str]) -> list[str]:
    """What caches are measured, each once: of attention by the names of formats, of the engine as it takes them."""
    if suite == FORMATS and not given:
        return [name for name in CACHE_FORMATS if name != "auto"]
    if suite == "engine":
        return list(dict.fromkeys(str(KVCacheDtype.of_model(text)) for text in given))
    return list(dict.fromkeys(format_of(KVCacheDtype.of(text).of_one_layer()).name for text in given))


def median_of_three(once: Callable[[], list[Row]]) -> list[Row]:
    """One measurement, or where the ratio of `JUDGED` is below `BEHIND` that of three which has its median; what our
    kernels computed wrong in any of them is what is kept. No other contender's ratio has a say.

    Its row then has all three, sorted, as `ratio_of_three`.
    """
    found = [once()]
    if _judged(found[0]) >= BEHIND:
        return found[0]
    found += [once(), once()]
    for rows in found:
        if any(str(row["refused"]).startswith("wrong") and by_own_kernels(row) for row in rows):
            return rows
    rated = sorted((rows for rows in found if _judged(rows) < math.inf), key=_judged)
    three = [judged_ratio(rows) for rows in rated]
    kept = rated[(len(rated) - 1) // 2]
    return [row | ({"ratio_of_three": three} if row["backend"] == JUDGED else {}) for row in kept]


def _judged(rows: Sequence[Row]) -> float:
    ratio = judged_ratio(rows)
    return math.inf if ratio is None else ratio


def _title(case: Case, name: str) -> str:
    return f"{case.suite} {case.layer} {case.text}: {name}"
