"""`pagedattn bench`: its table, its arithmetic, and a run on a CPU from the command to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import problem, report
from pagedattn.bench.contenders import contenders
from pagedattn.bench.measure import empty_row, measure
from pagedattn.bench.ratios import add_ratios, beside_auto, geometric_mean, summarise
from pagedattn.bench.report import ResultFile, header, line, summary_lines
from pagedattn.bench.table import SUITES, Case, case_of, cases
from pagedattn.errors import InvalidInputError

ROOT = Path(__file__).parent.parent
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")
# suite, heads, KV heads, head dim, block size, dtype: workloads. What is compared with other libraries.
TABLE = {
    ("decode", 32, 8, 128, 16, "bfloat16"): (
        "1q1s1k 1q1s8k 1q1s32k 1q1s128k 16q1s2k 64q1s4k 256q1s1k 128q1s8k 64q1s128*1.0906 1q1s64k+31q1s512"
    ),
    ("decode", 8, 1, 128, 16, "bfloat16"): "1q1s32k 64q1s8k",
    ("decode", 64, 8, 128, 16, "bfloat16"): "48q1s3000..4927",
    ("decode", 16, 8, 128, 16, "bfloat16"): "256q1s1k",
    ("prefill", 32, 8, 128, 16, "bfloat16"): "32q512 8q2k 2q8k 1q16k 2q2ks16k",
    ("prefill", 32, 8, 64, 16, "bfloat16"): "1q16k",
    ("prefill", 32, 8, 256, 16, "bfloat16"): "1q16k",
    ("prefill", 32, 8, 128, 16, "float16"): "1q16k",
    **{("prefill", 32, 8, 128, size, "bfloat16"): "1q16k" for size in (32, 64, 128, 256)},
    ("mixed", 32, 8, 128, 16, "bfloat16"): "1q2ks4k+64q1s2k 4q256s4k+128q1s3000",
}


def test_the_table_is_what_was_agreed() -> None:
    found: dict[tuple[object, ...], list[str]] = {}
    for case in cases("all", gpu=True):
        shape = (case.suite, case.heads, case.kv_heads, case.dim, case.block_size, case.dtype)
        found.setdefault(shape, []).append(case.text)
    assert found == {shape: texts.split() for shape, texts in TABLE.items()}
    for suite in SUITES:
        assert len({(case.layer, case.text) for case in cases(suite, gpu=True)}) == len(cases(suite, gpu=True))
        assert (
            bool(cases(suite, gpu=True))
            == bool(cases(suite, gpu=False))
            == (suite not in ("cache", "engine", "random"))
        )
    formats = cases("formats", gpu=True)
    layers = {(case.heads, case.kv_heads, case.dim) for case in formats}
    assert layers >= {(32, 8, 64), (32, 8, 96), (16, 8, 256), (9, 3, 64)}
    assert {case.suite for case in formats} == {"decode", "speculative", "shared", "append", "prefill"}
    assert all(case_of(case.text, gpu=True).suite == case.suite for case in formats)
    sweep = cases("sweep", gpu=True)
    assert [case.text for case in cases("shared", gpu=True)] == ["64q1s9k@8k", "256q1s2560@2k", "16q1s33k@32k"]
    assert len(sweep) > 30 and max(sum(case.work.seq_lens) for case in sweep) <= 1 << 20


def row(backend: str, us: float | None, suite: str = "decode", case: str = "a") -> dict[str, Any]:
    return {**empty_row(suite, case, backend), "us": us}


def test_ratios_are_to_the_better_way_of_each_library() -> None:
    times = {"TRITON": 10.0, "auto": None, "FA3": 12.0, "FlashInfer (wrappers)": 9.0, "FlashInfer (persistent)": 11.0}
    rows = [row(*pair) for pair in times.items()]
    add_ratios(rows, [*times][2:])
    assert rows[0]["ratios"] == {"FA3": 1.2, "FlashInfer": 0.9} and rows[0]["ratio"] == 0.9
    assert all(one["ratio"] is one["ratios"] is None for one in rows[1:])
    alone = [row("TRITON", 10.0), row("FA3", None)]
    add_ratios(alone, ["FA3"])
    assert alone[0]["ratio"] is None and summarise(alone) == {}


def test_the_summary_is_geometric_and_names_the_worst() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1) and geometric_mean([1.1] * 3) == pytest.approx(1.1)
    suites = ("decode", "decode", "prefill", "mixed", "sweep")
    rows = [row("TRITON", 1.0, suite, case) for suite, case in zip(suites, "abcde", strict=True)]
    for one, ratio in zip(rows, (1.21, 1.0, 0.81, 1.0, 0.1), strict=True):
        one["ratio"] = ratio
    (facts,) = summarise(rows).values()
    assert facts == {
        "decode": {"ratio": 1.1, "rows": 2},
        "prefill+mixed": {"ratio": 0.9, "rows": 2},
        "behind": 1,
        "worst": {"case": "c", "ratio": 0.81},
    }
    (text,) = summary_lines({"summary": {"TRITON": facts}})
    expected = (
        "TRITON against the best peer: decode 1.100 (2 rows), prefill+mixed 0.900 (2 rows), 1 below 0.95, worst 0.81"
    )
    assert text == f"{expected}0 at c"


def test_formats_are_summed_up_beside_the_16_bit_cache() -> None:
    times = (("decode", "a", 4.0, 2.0), ("decode", "b", 9.0, 8.0), ("shared", "c", 3.0, 4.0))
    rows = []
    for suite, case, auto, us in times:
        stored = [row(name, time, suite, case) for name, time in (("TRITON", us), ("TRITON auto", auto), ("FA3", None))]
        rows += (stored := [one | {"kv_cache_dtype": "int8"} for one in stored])
        add_ratios(stored, ["FA3"])
    plain = row("TRITON", 1.0)
    add_ratios([plain, row("FA3", 2.0)], ["FA3"])
    (facts,) = (found := beside_auto([*rows, plain])).values()
    assert [*found] == ["TRITON (int8)"] and facts == {
        "decode": {"ratio": 1.5, "rows": 2},
        "shared": {"ratio": 0.75, "rows": 1},
        "slower": 1,
        "worst": {"case": "c", "ratio": 0.75},
    }
    (text,) = summary_lines({"summary": {}, "beside_auto": found})
    means = "decode 1.500 (2 rows), shared 0.750 (1 rows)"
    assert text == f"TRITON (int8) against TRITON auto: {means}, 1 slower, worst 0.750 at c"


def test_a_line_has_its_values_under_their_names() -> None:
    values = {"us": 252.31, "gb_s": 4256.6, "tflops": 17.02, "copy_percent": 99.3, "ratios": {"FlashInfer": 1.0021}}
    text = line({**row("TRITON", 1.0, case="32/8/128 64q1s4k"), **values, "error": 2.13e-3, "host_us": 18.4})
    ends = {name: header().index(name) + len(name) for name in ("us", "GB/s", "copy", "FlashInfer", "error", "host us")}
    told = {"us": "252.3", "GB/s": "4257", "copy": "99%", "FlashInfer": "1.002", "error": "2.1e-03", "host us": "18"}
    assert {name: text[: ends[name]].split()[-1] for name in ends} == told
    assert len(text) == len(header()) and text.startswith("decode 32/8/128 64q1s4k ")
    assert line({**row("FA3", None), "refused": "no GPU"}).endswith(" refused: no GPU")
    assert line({**row("FA3", None), "refused": "wrong: by much"}).endswith("  wrong: by much")


def test_contenders_are_asked_for_by_name() -> None:
    names = lambda text: [one.name for one in contenders(text)]  # noqa: E731
    assert names("FLASH_ATTN,TRITON") == ["TRITON", "FLASH_ATTN (FA3)", "FLASH_ATTN (FA2)"]
    assert names("FlashInfer, FA3") == ["FA3", "FlashInfer (wrappers)", "FlashInfer (persistent)"]
    assert names("FLASH_ATTN (FA2)") == ["FLASH_ATTN (FA2)"] and names("FLASHINFER") == ["FLASHINFER"]
    with pytest.raises(InvalidInputError, match=r"--backends must be of TRITON, .*auto, .*, got 'triton'"):
        contenders("FA3,triton")
    assert names("TRITON deterministic") == ["TRITON deterministic"] and "TRITON deterministic" not in names(None)


def test_a_run_that_ends_early_leaves_its_rows(tmp_path: Path) -> None:
    result = ResultFile(tmp_path / "r.json", {"copy_gb_s": 4000.0}, contenders("FA3,FlashInfer,TRITON"))
    result.add([row("TRITON", 10.0)])
    result.add([row("TRITON", 20.0, case="b")])
    content = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [one["us"] for one in content["rows"]] == [10.0, 20.0] and content["meta"]["copy_gb_s"] == 4000.0
    assert [*content["meta"]["peers"]] == ["FA3", "FlashInfer"]


def test_layers_are_as_many_as_fill_the_memory_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("decode", "2q1s64", 8, 2, 64, dtype="float32")
    for size, expected in ((1, 2), (5 * 2 * 128 * 2 * 64 * 4, 5), (1 << 40, 32)):
        monkeypatch.setattr(problem, "_TOTAL_BYTES", size)
        assert problem.make_problem(case).layers == expected
    monkeypatch.setattr(problem, "_TOTAL_FLOPS", 3.5 * case.work.flops(8, 64))
    assert problem.make_problem(case).layers == 3


@CPU_ONLY
@pytest.mark.parametrize("place", [(0, 0), (-1, -1)], ids=["first row", "last row, last head"])
def test_an_error_anywhere_that_is_looked_at_is_seen(place: tuple[int, int]) -> None:
    one = problem.make_problem(Case("prefill", "2q40s50", 8, 2, 64, dtype="float32"))
    out = contenders("TORCH")[0].run(one).attend(0)
    assert one.error(out) < 1e-6
    out[place] *= 1.01
    with pytest.raises(ArithmeticError, match="where a naive implementation has"):
        one.error(out)


@CPU_ONLY
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_format_is_held_to_the_rows_that_it_stores(name: str) -> None:
    case = Case("append", "2q40s50", 8, 2, 64, dtype="float32", kv_cache_dtype=name)
    one = problem.make_problem(case)
    (torch_path,) = contenders("TORCH")
    stored, plain = torch_path.run(one), replace(torch_path, kv_cache_dtype="auto").run(one)
    assert one.error(stored.attend(0), 16, stored.kv_cache_dtype) < 1e-6 and one.paged().layer(0).format == name
    assert one.error(plain.attend(0), 16, "auto") < 1e-6
    with pytest.raises(ArithmeticError, match="where a naive implementation has"):
        one.error(plain.attend(0))
    assert one.error(plain.attend(0), tolerance=0.2) > 1e-3


def test_bytes_are_those_of_codes_and_scales() -> None:
    case = Case("decode", "2q1s100@64")
    element = {"auto": 2 * 128, "int8": 128 + 4, "fp8_e4m3": 128}
    assert {name: case.bytes_read(name) for name in element} == {x: 136 * 8 * 2 * n for x, n in element.items()}
    assert case._replace(kv_cache_dtype="int8", block_size=64).layer == "32/8/128 int8 blocks of 64"
    small = Case("decode", "2q1s64", dtype="float16")
    layers = {x: problem.make_problem(small._replace(kv_cache_dtype=x)).layers for x in ("auto", "fp8_e4m3")}
    assert layers["fp8_e4m3"] == 2 * layers["auto"]


def test_a_wheel_has_the_benchmark_without_its_tests(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shipped = {path.stem for path in (tmp_path / "pagedattn" / "bench").iterdir()}
    assert {"command", "measure", "peers", "plot", "workload", "__init__"} <= shipped
    here_only = "conftest test_attention test_ops gpu_test host_cost sanitize tune_decode"
    assert not shipped & {*here_only.split()}
    assert (tmp_path / "pagedattn" / "engine" / "api" / "llm.py").exists()


def test_a_bar_on_a_terminal_and_only_there(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in (
        (True, "\r\x1b[K[###############...............] 1/2 FA3\r\x1b[Kdone\n"),
        (False, "done\n"),
    ):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        progress = report.Progress(2)
        progress.done = 1
        progress.tell("FA3")
        progress.say("done")
        assert capsys.readouterr().out == expected


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert report._commit(tmp_path / "bench") == "unknown"
    (tmp_path / "setup.py").touch()
    assert report._commit(tmp_path / "bench") == "unknown"


@CPU_ONLY
def test_on_a_cpu_torch_alone_takes_part() -> None:
    assert [one.name for one in contenders(None)] == ["TORCH"]
    assert measure(cases("decode", gpu=False)[0], contenders(None), {})[0]["refused"] is None
