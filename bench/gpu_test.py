"""`make gpu-test`: the tests that a GPU can run, with a JSON record of what ran; installs nothing."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pagedattn

ROOT = Path(__file__).parent.parent
# Those whose tests take longest stand first.
SUITES = (
    *("tests/gpu", "tests/backends", "tests/ops", "tests/test_deterministic.py", "tests/test_compile.py"),
    *("tests/engine/test_fused_ops.py", "tests/engine/test_draw_kernels.py", "tests/engine/test_decode_inputs.py"),
    *("tests/engine/test_token_counts.py", "tests/test_rounding.py", "tests/test_format_int4.py"),
    *("tests/test_format_k8v4.py", "tests/test_format_turboquant.py"),
    *("tests/integrations/test_hf_generate_gpu.py", "tests/integrations/test_engine_graphs_gpu.py"),
)
ALONE = (  # these take most of the device's memory
    "tests/gpu/test_large_cache.py",
    "tests/engine/test_runner_gpu.py",
    "tests/engine/test_swap_gpu.py",
    "tests/engine/test_tensor_parallel_gpu.py",
    "tests/engine/test_backends_gpu.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200")
    parser.add_argument("--name", default="gpu_test", help="of the record: NAME.json")
    parser.add_argument("--problems", type=int, help="random problems of TRITON to draw, if not as many as usual")
    parser.add_argument("--random-seed", type=int, default=0, help="of what those are drawn by")
    parser.add_argument("--random-part", default="1/1", help="one part of those alone, such as 2/4")
    parser.add_argument("--problem", action="append", default=[], help="one of those alone, KIND:SEED/INDEX")
    parser.add_argument("suites", nargs="*", help="files or folders to run instead of all")
    args = parser.parse_args()
    together, alone = split(args.suites or [*SUITES, *ALONE])
    if not torch.cuda.is_available():
        print("gpu-test needs a CUDA device and a torch that sees it; on a CPU run `make test`")
        return 1
    begun, options = time.perf_counter(), [] if args.problems is None else ["--problems", str(args.problems)]
    options += ["--random-seed", str(args.random_seed), "--random-part", args.random_part]
    options += [f"--problem={text}" for text in args.problem]
    with tempfile.TemporaryDirectory() as folder:
        beside = [*options, *_workers(), *(f"--ignore={ROOT / suite}" for suite in ALONE)]
        reports = [Path(folder) / "parallel.xml", Path(folder) / "alone.xml"]
        runs = ((together, reports[0], beside), (alone, reports[1], options))
        status = max(_run(suites, report, how) for suites, report, how in runs if suites)
        record = _record([report for report in reports if report.exists()], args.commit, time.perf_counter() - begun)
        record["meta"] |= {"random_seed": args.random_seed, "random_part": args.random_part}
        record["meta"] |= {"problem": args.problem} if args.problem else {}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["rows"], indent=1))
    return status


def split(suites: Sequence[str]) -> tuple[list[str], list[str]]:
    """What runs side by side, and what alone; a folder is in both where it holds such files."""
    together = [suite for suite in suites if not suite.startswith(ALONE)]
    named = [suite for suite in suites if suite.startswith(ALONE)]
    held = [file for file in ALONE if any(Path(file).is_relative_to(suite) for suite in together)]
    return together, list(dict.fromkeys([*named, *held]))


def _workers() -> list[str]:
    """A process per core but two, 14 at most. Where one has nothing left it takes over from others: tests that compile
    stand in rows, and take a thousand times as long as some."""
    if importlib.util.find_spec("xdist") is None:
        return []
    steal = hasattr(importlib.import_module("xdist.scheduler"), "WorkStealingScheduling")  # from 3.2 on
    workers = max(2, min(14, len(os.sched_getaffinity(0)) - 2))
    return ["-n", str(workers), *(["--dist", "worksteal"] if steal else [])]


def _run(suites: Sequence[str], report: Path, options: list[str]) -> int:
    paths = [str(ROOT / suite) for suite in suites]
    said = ["-q", "-p", "no:warnings", "--durations=20"]
    return int(pytest.main([*said, f"--rootdir={ROOT}", f"--junitxml={report}", *options, *paths]))


def _record(reports: list[Path], commit: str, seconds: float) -> dict[str, Any]:
    """How many tests of each file had which outcome, and the seconds that they took one after the other; of random
    problems how many passed, by other libraries too, which failed, by what draws them again, and what was left out."""
    outcomes: Counter[tuple[str, str]] = Counter()
    took: dict[tuple[str, str], float] = defaultdict(float)
    problems: Counter[str] = Counter()
    told: dict[str, list[str]] = {"failed": [], "left out": []}
    for case in itertools.chain(*(xml.parse(report).getroot().iter("testcase") for report in reports)):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        key = case.get("classname", ""), outcome
        outcomes[key] += 1
        took[key] += float(case.get("time", 0))
        for one in case.iterfind("properties/property"):
            name, value = one.get("name", ""), one.get("value", "")
            if name in told:
                told[name].append(value)
            elif name.startswith("problems") and outcome == "passed":
                problems[name] += int(value)
    meta = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pagedattn": pagedattn.__version__,
        "backends": pagedattn.list_backends(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds),
        "random_problems": problems["problems"],
        "random_problems_of_others": {name[9:]: count for name, count in problems.items() if name != "problems"},
        "random_failures": told["failed"],
        "random_left_out": told["left out"],
    }
    rows = [
        {"suite": suite, outcome: count, "seconds": round(took[suite, outcome], 1)}
        for (suite, outcome), count in sorted(outcomes.items())
    ]
    return {"meta": meta, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
