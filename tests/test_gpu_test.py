"""`make gpu-test` and `make gpu-random` without a GPU: what is run where, what is drawn, and what the record says."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.drawn_kinds import STORED, WITH_NATIVE, case_drawn, lengths_drawn, names
from backends.test_triton_random import FIXED, KINDS, PER_TEST, QUANTISED, SHAPES, case_of, named, part_of, shares

from pagedattn.backends.registry import get_backend
from pagedattn.backends.triton.metadata import shape_of_spec
from pagedattn.bench import gpu_test
from pagedattn.bench.random_shapes import LAYERS
from pagedattn.kernels.dequantise import plan as dequantise
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.shape import BatchBounds
from pagedattn.ops.attention_plan import plan_spans
from pagedattn.spec.mask import KERNEL_FEATURES
from pagedattn.testing import check, make_problem

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
    tests = shares(total, 3)
    assert [index for one in tests for index in one.indices] == [*range(total)] and {one.seed for one in tests} == {3}
    assert max(len(one.indices) for one in tests) <= PER_TEST
    drawn = [f"drawn 3/{number}" for number in range(max(total // PER_TEST, 1))]
    assert [*dict.fromkeys(one.kind for one in tests)] == [*KINDS, *QUANTISED, *drawn]


def test_parts_of_the_problems_make_up_all_of_them() -> None:
    every = shares(1_000)
    for parts in (1, 3, 4, len(every)):
        found = [part_of(every, f"{part}/{parts}") for part in range(1, parts + 1)]
        assert [share for part in found for share in part] == every and all(found)
        assert max(map(len, found)) - min(map(len, found)) <= 1
    for text in ("0/4", "5/4", "4", "x/2", ""):
        with pytest.raises(pytest.UsageError, match="--random-part must be I/N"):
            part_of(every, text)


def test_a_problem_is_drawn_again_by_what_a_failure_says() -> None:
    assert named("drawn 3/17:5/1234") == ("drawn 3/17", 5, range(1234, 1235))
    assert named("D256, blocks of 32:0/7").kind == "D256, blocks of 32"
    assert case_of("drawn 3/17", 1234, 5) == case_of("drawn 3/17", 1234, 5) != case_of("drawn 3/17", 1234, 6)
    for text in ("drawn 3/17", "another:0/1", "plain:0", "plain:x/1"):
        with pytest.raises(pytest.UsageError, match="--problem must be KIND:SEED/INDEX"):
            named(text)


def test_drawn_layers_have_every_format_and_mask_and_triton_serves_them() -> None:
    layers = [case_drawn(name) for name in names(400)]
    assert {case.kv_cache_dtype for case in layers} == {"auto", *STORED, *WITH_NATIVE}
    assert {(*case.heads, case.head_dim) for case in layers} == {*LAYERS}
    assert {case.block_size for case in layers} == {16, 32, 64, 128}
    assert {case.kv_scale for case in layers} == {"none", "float", "tensor", "head"}
    features = {name for case in layers for name in case.spec(torch.device("cpu")).mask.features}
    assert features == {*KERNEL_FEATURES}
    for has in ("softcap", "sinks", "alibi", "deterministic", "poison_behind"):
        assert 4 <= sum(bool(getattr(case, has)) for case in layers) < 120, has
    assert {case.causal for case in layers} == {None, False} and {case.layout for case in layers} == {"NHD", "HND"}
    for case in layers:
        spec = case.but(dtype=torch.float16).spec(torch.device("cpu"))
        assert not get_backend("TRITON").rejections(replace(spec, device_type="cuda", capability=(9, 0))), case.id


def test_drawn_lengths_are_small_and_of_every_kind_of_step() -> None:
    steps = [lengths_drawn(random.Random(i)) for i in range(200)]
    assert max(sum(keys) for _, keys in steps) <= 8000 and max(max(queries) for queries, _ in steps) > 500
    assert {min(queries) == max(queries) == 1 for queries, _ in steps} == {True, False}


@pytest.mark.parametrize("number", range(8))
def test_drawn_problems_are_right_ones(number: int) -> None:
    """By torch, over short ones: what the oracle expects of caches of such a layer can be computed."""
    name = [one for one in names(200) if case_drawn(one).kv_cache_dtype != "auto"][number]
    case = case_drawn(name).but(dtype=torch.float32, deterministic=False, query_lens=(1, 3), seq_lens=(70, 40))
    check(get_backend("TORCH"), make_problem(case, "cpu", number), name)


def test_random_problems_go_to_both_kernels() -> None:
    """All kinds are ones that Hopper's kernel serves, of quantised caches a copy where they are long, and what is drawn
    differs where it should."""
    copied = set()
    ran: dict[str, set[str]] = {shape: set() for shape in SHAPES}
    queries, keys = set(), set()
    for kind, _, indices in shares(12000):
        for index in indices if kind in FIXED else ():
            case = case_of(kind, index)
            shape = shape_of_spec(case.spec(torch.device("cpu")))
            assert not sm90.why_not(dequantise.native_shape(shape), ""), kind
            decodes = next((i for i, n in enumerate(case.query_lens) if n != 1), len(case.query_lens))
            bounds = BatchBounds(0, len(case.query_lens), decodes, max(case.query_lens), 0)
            if dequantise.copy_turns(shape, bounds._replace(max_seq_len=max(case.seq_lens))):
                copied.add(kind)
            spans = plan_spans(shape, bounds, sm90.params_of(shape, bounds, 132), portable=True)
            ran[SHAPES[index % len(SHAPES)]] |= {span.kernel for span in spans if span.last > span.first}
            queries |= {*case.query_lens}
            keys |= {*case.seq_lens}
    assert ran["decodes"] == ran["few"] == {"decode"} and ran["mixed"] == {"decode", "prefill"}
    assert "prefill" in ran["prompts"] and copied == {*QUANTISED}
    assert {0, 1, 16, 17, 128, 129} <= queries and {0, 1, 128, 129, 6000} <= keys


def test_the_record_counts_tests_seconds_and_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    values = (("problems", 50), ("problems FLASHINFER", 7), ("left out", "FLASH_ATTN, drawn 0/1: not built"))
    told = "".join(f'<property name="{name}" value="{value}"/>' for name, value in values)
    property_ = f"<properties>{told}</properties>"
    failed = '<properties><property name="failed" value="TRITON, plain:0/7"/></properties>'
    cases = [
        f'<testcase classname="a" name="1" time="1.5">{property_}</testcase>',
        f'<testcase classname="a" name="2" time="2.0">{property_}</testcase>',
        f'<testcase classname="a" name="3" time="1.0">{failed}<failure/></testcase>',
        '<testcase classname="b" name="1" time="0.1"><skipped/></testcase>',
    ]
    (tmp_path / "r.xml").write_text(
        f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8"
    )
    record = gpu_test._record([tmp_path / "r.xml"], "abc1234", 61.2)
    meta = record["meta"]
    assert isinstance(meta, dict) and (meta["random_problems"], meta["seconds"], meta["commit"]) == (100, 61, "abc1234")
    assert meta["random_problems_of_others"] == {"FLASHINFER": 14} and meta["random_failures"] == ["TRITON, plain:0/7"]
    assert meta["random_left_out"] == ["FLASH_ATTN, drawn 0/1: not built"] * 2
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
    words += ["--random-seed", "5", "--random-part", "2/4", "--problem", "plain:5/3"]
    monkeypatch.setattr(sys, "argv", ["gpu_test.py", *words])
    assert gpu_test.main() == 1, "the worse of two"
    together, alone = asked
    assert together[-1] == str(ROOT / "tests/gpu") and alone[-1] == str(ROOT / LARGE)
    assert all(one[one.index("--problems") + 1] == "7" for one in asked) and "-n" not in alone
    assert together[together.index("-n") + 1] == "7" and together[together.index("--dist") + 1] == "worksteal"
    record: dict[str, Any] = json.loads((tmp_path / "new" / "few.json").read_text(encoding="utf-8"))
    assert all("--problem=plain:5/3" in one and one[one.index("--random-seed") + 1] == "5" for one in asked)
    assert all(one[one.index("--random-part") + 1] == "2/4" for one in asked)
    drawn = record["meta"]["random_seed"], record["meta"]["random_part"], record["meta"]["problem"]
    assert drawn == (5, "2/4", ["plain:5/3"])
    assert record["meta"]["commit"] == "abc1234" and record["rows"] == [{"suite": "a", "passed": 2, "seconds": 2.0}]
