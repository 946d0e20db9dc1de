"""`pagedattn bench engine` on a CPU: tiny workloads of every kind, from the command to the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_work import everything

from pagedattn.bench import engine_bench
from pagedattn.bench.engine_cases import common, engine_cases
from pagedattn.bench.engine_clock import PARTS, _covered
from pagedattn.cli import command

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")


def test_the_common_workload_is_the_one_that_others_publish() -> None:
    prompts, params = common()
    assert sum(map(len, prompts)) == 142_827
    assert sum(one.max_tokens or 0 for one in params) == 133_966


@CPU_ONLY
def test_a_run_from_the_command_to_the_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench, "_RUNS", 1)
    left = set() if everything else {"penalties", "two ranks"}
    table = [case for case in engine_cases(gpus=0) if case.name not in left]
    monkeypatch.setattr(engine_bench, "engine_cases", lambda gpus: table)
    file = tmp_path / "engine.json"
    assert command.main(["bench", "engine", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["meta"]["gpu"] is None
    rows = {row["workload"]: row for row in content["rows"]}
    assert [*rows] == [case.name for case in table]
    for name, row in rows.items():
        assert f"tiny {name} (auto): {row['tok_s']:.0f} output tokens/s" in out
        assert row["refused"] is None and row["tok_s"] > 0 and row["steps"] > 5 and row["start_up_s"] > 0
        assert {*row["host_ms"]} == {*PARTS, "other"} and all(row["host_ms"][part] > 0 for part in PARTS)
        assert row["output_tokens"] == sum(len(one) for one in out_tokens(name))
    assert rows["preempt"]["preemptions"] > 0 and rows["shared"]["cached_tokens"] > 0
    assert rows["common"]["replays"] > 10 and rows["latency"]["replays"] == 0


def out_tokens(name: str) -> list[range]:
    (case,) = [case for case in engine_cases(gpus=0) if case.name == name]
    return [range(params.max_tokens or 0) for params in case.requests()[1]]


@CPU_ONLY
def test_one_workload_by_name_and_a_backend_that_cannot(capsys: Any) -> None:
    assert command.main(["bench", "engine", "--workload", "latency", "--backends", "FLASHINFER"]) == 1
    assert "latency (FLASHINFER): refused: " in capsys.readouterr().out
    assert command.main(["bench", "engine", "--workload", "huge"]) == 2
    assert "--workload must be one of common" in capsys.readouterr().err


def test_spans_that_overlap_are_counted_once() -> None:
    assert _covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == (4.0, 6.0)
    assert _covered([]) == (0.0, 0.0)


@CPU_ONLY
def test_formats_are_measured_after_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench, "_RUNS", 1)
    file, given = tmp_path / "engine.json", ("auto", "int8:skip=0", "int4", "int4", "int8:skip=7")
    formats = [text for name in given for text in ("--kv-cache-dtype", name)]
    assert command.main(["bench", "engine", "--workload", "common", "--json", str(file), *formats]) == 1
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["workload"] for row in rows] == ["common", *(f"common, {given[at]}" for at in (1, 2, 4))]
    assert [row["options"].get("kv_cache_dtype") for row in rows] == [None, "int8:skip=0", "int4", "int8:skip=7"]
    assert all(row["tok_s"] > 0 for row in rows[:3])
    assert "skip_layers must be layers in [-2, 2), got 7" in rows[3]["refused"]


def test_a_format_of_a_case_of_the_table_is_its_own() -> None:
    cases = {case.name: case for case in engine_cases(gpus=1)}
    for name in ("int8", "fp8", "k8v4", "int4"):
        assert cases["common"].over(name).options == cases[f"common, {name}"].options
        assert cases["common"].over(name).name == f"common, {name}"
