"""`make gpu-test` and `make gpu-random` without a GPU: what is run where, what is drawn, and what the record says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.test_triton_random import KINDS, PER_TEST, PORTABLE, QUANTISED, SHAPES, case_of, shares

from pagedattn.backends.triton.metadata import shape_of_spec
from pagedattn.bench import gpu_test
from pagedattn.kernels.dequantise import plan as dequantise
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.shape import BatchBounds
from pagedattn.ops.attention_plan import plan_spans

ROOT = Path(__file__).parent.parent
LARGE, RUNNER, SWAP, *REST = gpu_test.ALONE


def test_every_test_that_a_gpu_can_run_is_named_once() -> None:
    together, alone = gpu_test.split([*gpu_test.SUITES, *gpu_test.ALONE])
    assert together == [*gpu_test.SUITES] and sorted(alone) == sorted(gpu_test.ALONE)
    assert all((ROOT / suite).exists() for suite in (*together, *alone))
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8") and file.name != Path(__file__).name:
            assert str(file.relative_to(ROOT)).startswith((*gpu_test.SUITES, *gpu_test.ALONE)), file


@pytest.mark.parametrize(
    ("suites", "together", "alone"),
    [
        (["tests/ops"], ["tests/ops"], []),
        (["tests/gpu"], ["tests/gpu"], [LARGE]),
        ([LARGE, "tests/gpu"], ["tests/gpu"], [LARGE]),
        ([f"{RUNNER}::test_x"], [], [f"{RUNNER}::test_x"]),
        (["tests"], ["tests"], [LARGE, RUNNER, SWAP, *REST]),
    ],
)
def test_what_takes_the_memory_runs_alone(suites: list[str], together: list[str], alone: list[str]) -> None:
    assert gpu_test.split(suites) == (together, alone)


@pytest.mark.parametrize("total", [1, 24, 250, 10_000])
def test_as_many_problems_as_were_asked_for(total: int) -> None:
    tests = shares(total)
    assert [seed for _, seeds in tests for seed in seeds] == [*range(total)]
    assert max(len(seeds) for _, seeds in tests) <= PER_TEST
    assert [*dict.fromkeys(kind for kind, _ in tests)] == [*KINDS, *QUANTISED, *PORTABLE]


def test_random_problems_go_to_both_kernels() -> None:
    """All kinds are ones that Hopper's kernel serves, of quantised caches a copy where they are long, and what is drawn
    differs where it should."""
    copied = set()
    ran: dict[str, set[str]] = {shape: set() for shape in SHAPES}
    queries, keys = set(), set()
    for kind, seeds in shares(1200):
        for seed in seeds:
            case = case_of(kind, seed)
            shape = shape_of_spec(case.spec(torch.device("cpu")))
            assert not sm90.why_not(dequantise.native_shape(shape), ""), kind
            assert sm90.why_not(shape, "") or kind not in PORTABLE, kind
            decodes = next((i for i, n in enumerate(case.query_lens) if n != 1), len(case.query_lens))
            bounds = BatchBounds(0, len(case.query_lens), decodes, max(case.query_lens), 0)
            if dequantise.copy_turns(shape, bounds._replace(max_seq_len=max(case.seq_lens))):
                copied.add(kind)
            spans = plan_spans(shape, bounds, sm90.params_of(shape, 0, 132), portable=True)
            ran[SHAPES[seed % len(SHAPES)]] |= {span.kernel for span in spans if span.last > span.first}
            queries |= {*case.query_lens}
            keys |= {*case.seq_lens}
    assert ran["decodes"] == ran["few"] == {"decode"} and ran["mixed"] == {"decode", "prefill"}
    assert "prefill" in ran["prompts"] and copied == {*QUANTISED}
    assert {0, 1, 16, 17, 128, 129} <= queries and {0, 1, 128, 129, 6000} <= keys


def test_the_record_counts_tests_seconds_and_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    property_ = '<properties><property name="problems" value="50"/></properties>'
    cases = [
        f'<testcase classname="a" name="1" time="1.5">{property_}</testcase>',
        f'<testcase classname="a" name="2" time="2.0">{property_}</testcase>',
        f'<testcase classname="a" name="3" time="1.0">{property_}<failure/></testcase>',
        '<testcase classname="b" name="1" time="0.1"><skipped/></testcase>',
    ]
    (tmp_path / "r.xml").write_text(
        f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8"
    )
    record = gpu_test._record([tmp_path / "r.xml"], "abc1234", 61.2)
    meta = record["meta"]
    assert isinstance(meta, dict) and (meta["random_problems"], meta["seconds"], meta["commit"]) == (100, 61, "abc1234")
    assert record["rows"] == [
        {"suite": "a", "failure": 1, "seconds": 1.0},
        {"suite": "a", "passed": 2, "seconds": 3.5},
        {"suite": "b", "skipped": 1, "seconds": 0.1},
    ]


def test_a_run_from_the_command_to_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tests pytest is asked for, and how; the record names the commit that was given."""
    asked: list[list[str]] = []

    def run(words: list[str]) -> int:
        asked.append(words)
        (report,) = [word.partition("=")[2] for word in words if word.startswith("--junitxml=")]
        Path(report).write_text(
            '<testsuites><testcase classname="a" name="1" time="1"/></testsuites>', encoding="utf-8"
        )
        return len(asked) - 1

    for name, value in {"is_available": lambda: True, "get_device_name": lambda: "a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_test.pytest, "main", run)
    monkeypatch.setattr(gpu_test.os, "sched_getaffinity", lambda pid: range(9), raising=False)
    words = ["--commit", "abc1234", "--out", str(tmp_path / "new"), "--name", "few", "--problems", "7", "tests/gpu"]
    monkeypatch.setattr(sys, "argv", ["gpu_test.py", *words])
    assert gpu_test.main() == 1, "the worse of two"
    together, alone = asked
    assert together[-1] == str(ROOT / "tests/gpu") and alone[-1] == str(ROOT / LARGE)
    assert all(one[one.index("--problems") + 1] == "7" for one in asked) and "-n" not in alone
    assert together[together.index("-n") + 1] == "7" and together[together.index("--dist") + 1] == "worksteal"
    record: dict[str, Any] = json.loads((tmp_path / "new" / "few.json").read_text(encoding="utf-8"))
    assert record["meta"]["commit"] == "abc1234" and record["rows"] == [{"suite": "a", "passed": 2, "seconds": 2.0}]
