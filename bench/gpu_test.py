"""`make gpu-test`: the tests that a GPU can run, with a JSON record of what ran; installs nothing."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import pagedattn

ROOT = Path(__file__).parent.parent
SUITES = ("tests/backends", "tests/ops", "tests/test_deterministic.py", "tests/test_compile.py")
ALONE = ("tests/gpu", "tests/engine/test_runner_gpu.py")  # these take most of the device's memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200")
    parser.add_argument("suites", nargs="*", help="files or folders to run instead of all")
    args = parser.parse_args()
    alone = [suite for suite in args.suites or ALONE if suite.startswith(ALONE)]
    together = [suite for suite in args.suites or SUITES if suite not in alone]
    if not torch.cuda.is_available():
        print("gpu-test needs a CUDA device and a torch that sees it; on a CPU run `make test`")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        workers = ["-n", "12"] if importlib.util.find_spec("xdist") else []
        reports = [Path(folder) / "parallel.xml", Path(folder) / "alone.xml"]
        runs = ((together, reports[0], workers), (alone, reports[1], []))
        status = max(_run(suites, report, options) for suites, report, options in runs if suites)
        record = _record([report for report in reports if report.exists()], args.commit)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_test.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["rows"], indent=1))
    return status


def _run(suites: Sequence[str], report: Path, options: list[str]) -> int:
    paths = [str(ROOT / suite) for suite in suites]
    return int(pytest.main(["-q", "-p", "no:warnings", f"--rootdir={ROOT}", f"--junitxml={report}", *options, *paths]))


def _record(reports: list[Path], commit: str) -> dict[str, object]:
    outcomes: Counter[tuple[str, str]] = Counter()
    for case in itertools.chain(*(xml.parse(report).getroot().iter("testcase") for report in reports)):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes[case.get("classname", ""), outcome] += 1
    meta = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pagedattn": pagedattn.__version__,
        "backends": pagedattn.list_backends(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    rows = [{"suite": suite, outcome: count} for (suite, outcome), count in sorted(outcomes.items())]
    return {"meta": meta, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
