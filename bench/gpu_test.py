"""`make gpu-test`: the tests that a GPU can run, with a JSON record of what ran; installs nothing."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import pytest
import torch

import pagedattn

ROOT = Path(__file__).parent.parent
SUITES = ("tests/backends", "tests/ops", "tests/gpu", "tests/engine/test_runner_gpu.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-test needs a CUDA device and a torch that sees it; on a CPU run `make test`")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = ["-n", "12"] if importlib.util.find_spec("xdist") else []
        suites = [str(ROOT / suite) for suite in SUITES if (ROOT / suite).exists()]
        options = ["-q", "-p", "no:warnings", "--rootdir", str(ROOT), f"--junitxml={report}"]
        status = int(pytest.main([*options, *workers, *suites]))
        record = _record(report, args.commit)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_test.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["rows"], indent=1))
    return status


def _record(report: Path, commit: str) -> dict[str, object]:
    outcomes: Counter[tuple[str, str]] = Counter()
    for case in xml.parse(report).getroot().iter("testcase"):
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
