"""`pytest bench --benchmark-only` on a CPU: the smallest row of every op, by pytest-benchmark's own table and file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedattn import ops

ROOT = Path(__file__).parent.parent
SMALLEST = "-1_token or 1_pair or 1_block or 1_x_64 or states_of_1_token or 1_x_1_new or 3q1s40"
CSRC = {
    ("reshape_and_cache", "1 token"),
    ("reshape_and_cache fp8", "1 token"),
    ("reshape_and_cache_classic", "1 token"),
    ("copy_blocks", "1 pair"),
    ("swap_blocks on the host", "1 block"),
    ("gather_kv", "1 x 64 tokens"),
    ("concat_and_cache_mla", "1 token"),
    ("concat_and_cache_mla fp8_e4m3", "1 token"),
}
TORCH = {
    *CSRC,
    ("concat_and_cache_mla fp8_ds_mla", "1 token"),
    ("merge_attn_states", "2 states of 1 token"),
    ("compute_slot_mapping", "1 x 1 new"),
}
ATTENTION = ("paged_attention decode", "8/2/64 3q1s40..120", "TORCH")
# Whatever compares a result takes a tenth of a second longer than it does, and is counted.
PLUGIN = """
import time
from pathlib import Path

from bench import op_problems, problem

calls = []

def slow(compare):
    def run(*args, **kwargs):
        calls.append(compare.__name__)
        time.sleep(0.1)
        return compare(*args, **kwargs)
    return run

op_problems.same, op_problems.close = slow(op_problems.same), slow(op_problems.close)
problem.Problem.error = slow(problem.Problem.error)

def pytest_sessionfinish():
    Path(__file__).with_name("calls.txt").write_text(" ".join(calls), encoding="utf-8")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")
def test_the_table_has_the_time_of_a_call_and_not_of_its_check(tmp_path: Path) -> None:
    (tmp_path / "slow_checks.py").write_text(PLUGIN, encoding="utf-8")
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "slow_checks", "bench", "--benchmark-only", "-k", SMALLEST]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        environment.pop(name)
    done = subprocess.run(
        [*command, f"--benchmark-json={file}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    found = {tuple(row["extra_info"][name] for name in ("op", "case", "path")): row for row in rows if row["stats"]}
    expected = {(*one, "torch") for one in TORCH} | {ATTENTION}
    if ops.path_of("copy_blocks", "cpu") == "csrc":
        expected |= {(*one, "csrc") for one in CSRC}
    assert {*found} == expected and len(rows) == len(expected)
    for (op, *_), row in found.items():
        stats, info = row["stats"], row["extra_info"]
        assert row["group"] == f"{op} (wall time)" and row["options"]["timer"] == "now"
        assert stats["rounds"] >= 5 and stats["iterations"] == info["calls_per_round"]
        assert 0 < stats["min"] * stats["iterations"] < 0.1, "a round has a check in it"
    checks = (tmp_path / "calls.txt").read_text(encoding="utf-8").split()
    assert {*checks} == {"same", "close", "error"} and len(checks) >= len(rows)
