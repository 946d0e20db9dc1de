"""`pagedattn bench` on a CPU, from the command to the file, the pictures and the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import command as bench_command
from pagedattn.bench import problem, timing
from pagedattn.bench.measure import FIELDS, empty_row
from pagedattn.bench.report import header
from pagedattn.bench.table import SUITES, Case, cases
from pagedattn.cli import command
from pagedattn.formats.registry import FORMATS
from pagedattn.testing import interpreted

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")


def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, and no ceilings."""
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(timing, "_FEWEST", 1)
    monkeypatch.setattr(problem, "_TOTAL_BYTES", 1)
    monkeypatch.setattr(bench_command, "ceilings", dict)


@CPU_ONLY
def test_a_run_from_the_command_to_the_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setattr(timing, "_SECONDS", 0)
    file = tmp_path / "new" / "result.json"
    assert command.main(["bench", "mixed", "--backends", "TORCH", "--json", str(file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0] == header()
        and len(out) == 2
        and out[1].startswith("mixed 8/2/64 1q64s128+2q1s100")
        and "\r" not in out[1]
    )
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {*content} == {"meta", "rows"} and [*file.parent.iterdir()] == [file]
    meta, (only,) = content["meta"], content["rows"]
    facts = {"gpu", "cpu", "torch", "triton", "pagedattn", "backends", "peers", "commit", "date", "summary"}
    assert {*meta} == facts and meta["commit"] == "abc1234" and meta["gpu"] is None
    assert tuple(only) == FIELDS and (only["suite"], only["dtype"], only["backend"]) == ("mixed", "float32", "TORCH")
    assert only["us"] > 0 and 0 < only["error"] < 1e-5 and only["refused"] is only["ratio"] is None
    assert command.main(["bench", "--workload", "2q7_3q1s9", "--workload", "1q1s5..9", "--backends", "TORCH"]) == 0
    assert [text.split()[2] for text in capsys.readouterr().out.splitlines()[1:]] == ["2q7+3q1s9", "1q1s5..9"]


@CPU_ONLY
def test_formats_are_measured_after_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0)
    file, names = tmp_path / "r.json", ("auto", "int8", "fp8", "fp8_e4m3")
    formats = [text for name in names for text in ("--kv-cache-dtype", name)]
    assert command.main(["bench", "append", "--backends", "TORCH", "--json", str(file), *formats]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row.get("kv_cache_dtype") for row in rows] == [None, "int8", "fp8_e4m3"]
    assert [row["case"] for row in rows] == [f"8/2/64 {name}1q20s3000" for name in ("", "int8 ", "fp8_e4m3 ")]
    assert all(row["refused"] is None and row["us"] > 0 and row["error"] < 1e-5 for row in rows)


@CPU_ONLY
def test_the_suite_of_formats_has_every_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_replays(monkeypatch)
    file, every = tmp_path / "r.json", [name for name in FORMATS if name != "auto"]
    table = [case for case in cases("formats", gpu=False) if case.kv_heads == 3]
    assert len(table) == 5 and {case.dim for case in cases("formats", gpu=False)} == {64, 256}
    monkeypatch.setattr(bench_command, "cases", lambda *_: table)
    assert command.main(["bench", "formats", "--backends", "TORCH", "--json", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert all(row["refused"] is None and row["us"] > 0 for row in rows)
    assert [(row["suite"], row["head_dim"], row["kv_cache_dtype"]) for row in rows] == [
        (case.suite, case.dim, name) for case in table for name in every
    ]


@pytest.mark.skipif(not interpreted(), reason="compares with TRITON, which is interpreted here")
@pytest.mark.cover(by=lambda suite: [])  # they differ in lengths alone
@pytest.mark.parametrize("suite", ["append", "speculative", "shared"])
def test_formats_are_compared_with_the_16_bit_cache_in_one_run(
    suite: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_replays(monkeypatch)
    text = next(case.text for case in cases("formats", gpu=False) if case.suite == suite)
    monkeypatch.setattr(bench_command, "cases", lambda *_: [Case(suite, text, 9, 3, 64, dtype="float32")])
    file, names = tmp_path / "r.json", ("int8", "k8v4")
    formats = [text for name in names for text in ("--kv-cache-dtype", name)]
    assert command.main(["bench", suite, "--backends", "TRITON", "--json", str(file), *formats]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    ours = [row for row in content["rows"] if row["backend"] == "TRITON"]
    assert [row["kv_cache_dtype"] for row in ours] == [*names] and len(content["rows"]) == 2 * len(names)
    for row in ours:
        (facts,) = (content["meta"]["beside_auto"][key] for key in (f"TRITON ({row['kv_cache_dtype']})",))
        assert facts["worst"]["ratio"] == row["ratios"]["TRITON auto"] and facts[suite]["rows"] == 1
    assert capsys.readouterr().out.count(f"against TRITON auto: {suite}") == len(names)


@CPU_ONLY
def test_cache_operations_are_rows_too(capsys: Any) -> None:
    assert command.main(["bench", "cache"]) == 0
    out = capsys.readouterr().out
    names = ("write 16 tokens fp8", "write 16 tokens int8", "write 16 tokens k8v4", "copy_blocks 16 pairs")
    assert all(text in out for text in (*names, "gather 4 x 64 keys"))
    assert "refused" not in out and "wrong" not in out


@CPU_ONLY
def test_status_1_where_nobody_could_be_timed_and_2_for_a_bad_argument(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["bench", "decode", "--backends", "FlashInfer (wrappers)"]) == 1
    assert capsys.readouterr().out.count("refused: ") == len(cases("decode", gpu=False))
    monkeypatch.setattr(bench_command, "ceilings", lambda: pytest.fail("measured before the arguments were checked"))
    for argv, text in {
        ("bench", "decode", "--json", "."): "--json must be a file, got the folder .",
        ("bench", "engine", "--json", "/dev/null/r.json"): "--json must be a file that can be written",
        ("bench", "encode"): "suite must be one of decode, prefill",
        ("bench", "--workload", "x"): "workload must be parts like",
        ("bench", "--backends", "ALL"): "--backends must be of TRITON",
        ("bench", "--kv-cache-dtype", "int9"): "kv_cache_dtype must be one of auto, fp8_e4m3, fp8_e5m2, int8",
        ("bench", "--kv-cache-dtype", "int8:skip=0"): "kv_cache_dtype must be the format of one layer, without skip=",
        ("bench", "cache", "--kv-cache-dtype", "int8"): "--kv-cache-dtype must be used with a suite of attention or",
        ("bench", "engine", "--kv-cache-dtype", "int9:skip=0"): "kv_cache_dtype must be one of auto, fp8_e4m3",
    }.items():
        assert command.main(argv) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1


@CPU_ONLY
def test_json_without_a_name_is_all_that_standard_output_has(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_command, "measure", lambda *args: [empty_row("decode", "1q1s5", "TORCH") | {"us": 9.0}])
    monkeypatch.setattr(bench_command, "ceilings", dict)
    assert command.main(["bench", "--workload", "1q1s5", "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert {*content} == {"meta", "rows"} and [row["backend"] for row in content["rows"]] == ["TORCH"]
    assert err.startswith(header()) and not [*tmp_path.iterdir()]
    assert command.main(["bench", "--json", "decode"]) == 2
    assert "bench decode --json" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_help_names_every_suite(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.main(["bench", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {*SUITES} <= words and "engine" in SUITES


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"TRITON": "", "FLASH_ATTN (FA2)": "wrong: error 1.0"}, 0),
        ({"TRITON": "", "FlashInfer (wrappers)": "wrong: error 1.0", "FLASHINFER": "no kernel"}, 0),
        ({"TRITON": "wrong: error 1.0", "FA3": ""}, 1),
        ({"auto": "wrong: error 1.0", "FA3": ""}, 1),
        ({"csrc": "wrong: 3 elements", "FLASHINFER append": ""}, 1),
        ({"FLASH_ATTN (FA2)": "wrong: error 1.0", "TRITON": "no GPU"}, 1),
    ],
)
def test_whose_wrong_result_makes_the_status_1(
    found: dict[str, str], status: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        empty_row("decode", "1q1s5", name) | {"us": None if why else 9.0} | {"refused": why or None}
        for name, why in found.items()
    ]
    monkeypatch.setattr(bench_command, "measure", lambda *args: rows)
    monkeypatch.setattr(bench_command, "ceilings", dict)
    assert command.main(["bench", "--workload", "1q1s5"]) == status
    out = capsys.readouterr().out
    assert all(f"  {why}" in out for why in found.values() if why.startswith("wrong"))


@CPU_ONLY
def test_pictures_need_matplotlib_before_anything_is_measured(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench_command, "find_spec", lambda name: None)
        assert command.main(["bench", "decode", "--plot"]) == 2
        assert "pip install pagedattn[bench]" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")
    monkeypatch.setattr(timing, "_SECONDS", 0)
    assert command.main(["bench", "sweep", "--plot", "--json", str(tmp_path / "r.json")]) == 0
    made = [str(tmp_path / "plots" / f"sweep.{kind}") for kind in ("png", "svg")]
    assert capsys.readouterr().out.splitlines()[-2:] == made and all(Path(one).exists() for one in made)
