"""`pagedattn bench`: its grammar, its table, its arithmetic, and a run on a CPU from the command to the file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import checkout, cli
from pagedattn.bench import command as bench_command
from pagedattn.bench import problem, report, timing
from pagedattn.bench.contenders import contenders
from pagedattn.bench.measure import FIELDS, empty_row, measure
from pagedattn.bench.ratios import add_ratios, geometric_mean, summarise
from pagedattn.bench.report import ResultFile, header, line, summary_lines
from pagedattn.bench.table import SUITES, Case, case_of, cases
from pagedattn.bench.workload import parse
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
        assert bool(cases(suite, gpu=True)) == bool(cases(suite, gpu=False)) == (suite != "cache")
    sweep = cases("sweep", gpu=True)
    assert len(sweep) > 30 and max(sum(case.work.seq_lens) for case in sweep) <= 1 << 20


def test_lengths_of_a_workload() -> None:
    lens = {
        "8q2k": ([2048] * 8, [2048] * 8),
        "3q1s4k": ([1] * 3, [4096] * 3),
        "2q2ks16k": ([2048] * 2, [16384] * 2),
        "q5s7": ([5], [7]),
        "1q1": ([1], [1]),
        "5q1s10..30": ([1] * 5, [10, 15, 20, 25, 30]),
        "1q1s10..30": ([1], [10]),
        "3q2s8..4": ([2] * 3, [8, 6, 4]),
        "4q1s8*1.5": ([1] * 4, [8, 12, 18, 27]),
    }
    for text, expected in lens.items():
        assert parse(text)[1:] == expected, text
    assert parse("48q1s3000..4927").seq_lens == [3000 + 41 * i for i in range(48)]
    assert parse("64q1s128*1.0906").seq_lens == [int(128 * 1.0906**i) for i in range(64)]
    assert parse("1q1s64k+31q1s512").seq_lens == [65536] + [512] * 31


def test_decodes_come_first() -> None:
    mixed = parse("1q2ks4k_2q1s5_1q1_1q3")
    assert mixed == ("1q2ks4k+2q1s5+1q1+1q3", [1, 1, 2048, 1, 3], [5, 5, 4096, 1, 3])
    assert mixed.num_decodes == 2
    assert [case_of(text, gpu=True).suite for text in ("2q1s9", "2q9", "2q9+1q1s4")] == ["decode", "prefill", "mixed"]
    built = problem.make_problem(case_of("1q20s64+2q1s100", gpu=False)).paged().common
    assert (built.num_decodes, built.num_seqs, built.max_query_len) == (2, 3, 20)


@pytest.mark.parametrize(
    "text", ["", "64", "q", "1q4s", "1q4x", "0q4", "1q0", "1q4s3", "2q1s9..", "2q1s9*", "1q4++1q4"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="workload must be"):
        parse(text)


def test_bytes_and_operations() -> None:
    work = parse("2q1s100+1q3")
    assert work.bytes_read(kv_heads=8, dim=128, itemsize=2) == 2 * 203 * 8 * 128 * 2
    assert work.flops(heads=32, dim=128) == 4 * 32 * 128 * (100 + 100 + 1 + 2 + 3)


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
        "worst": {"case": "c", "ratio": 0.81},
    }
    expected = "TRITON against the best peer: decode 1.100 (2 rows), prefill+mixed 0.900 (2 rows), worst 0.810 at c"
    assert summary_lines({"TRITON": facts}) == [expected]


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
    with pytest.raises(InvalidInputError, match=r"--backends must be of TRITON, auto, .*, got 'triton'"):
        contenders("FA3,triton")


@CPU_ONLY
def test_a_run_from_the_command_to_the_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setattr(timing, "_SECONDS", 0)
    file = tmp_path / "new" / "result.json"
    assert cli.main(["bench", "mixed", "--backends", "TORCH", "--json", str(file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (
        out[0] == header()
        and len(out) == 2
        and out[1].startswith("mixed 8/2/64 1q64s128+2q1s100")
        and "\r" not in out[1]
    )
    content = json.loads(file.read_text())
    assert {*content} == {"meta", "rows"} and [*file.parent.iterdir()] == [file]
    meta, (only,) = content["meta"], content["rows"]
    facts = {"gpu", "cpu", "torch", "triton", "pagedattn", "backends", "peers", "commit", "date", "summary"}
    assert {*meta} == facts and meta["commit"] == "abc1234" and meta["gpu"] is None
    assert tuple(only) == FIELDS and (only["suite"], only["dtype"], only["backend"]) == ("mixed", "float32", "TORCH")
    assert only["us"] > 0 and 0 < only["error"] < 1e-5 and only["refused"] is only["ratio"] is None
    assert cli.main(["bench", "--workload", "2q7_3q1s9", "--workload", "1q1s5..9", "--backends", "TORCH"]) == 0
    assert [text.split()[2] for text in capsys.readouterr().out.splitlines()[1:]] == ["2q7+3q1s9", "1q1s5..9"]


@CPU_ONLY
def test_cache_operations_are_rows_too(capsys: Any) -> None:
    assert cli.main(["bench", "cache"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("write 16 tokens fp8", "copy_blocks 16 pairs", "gather 4 x 64 keys"))
    assert "refused" not in out and "wrong" not in out


@CPU_ONLY
def test_status_1_where_nobody_could_be_timed_and_2_for_a_bad_argument(capsys: Any) -> None:
    assert cli.main(["bench", "decode", "--backends", "FlashInfer (wrappers)"]) == 1
    assert capsys.readouterr().out.count("refused: ") == len(cases("decode", gpu=False))
    for argv, text in {
        ("bench", "encode"): "suite must be one of decode, prefill",
        ("bench", "--workload", "x"): "workload must be parts like",
        ("bench", "--backends", "ALL"): "--backends must be of TRITON",
    }.items():
        assert cli.main(argv) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1


@CPU_ONLY
def test_pictures_need_matplotlib_before_anything_is_measured(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench_command, "find_spec", lambda name: None)
        assert cli.main(["bench", "decode", "--plot"]) == 2
        assert "pip install pagedattn[bench]" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")
    monkeypatch.setattr(timing, "_SECONDS", 0)
    assert cli.main(["bench", "sweep", "--plot", "--json", str(tmp_path / "r.json")]) == 0
    made = [str(tmp_path / "plots" / f"sweep.{kind}") for kind in ("png", "svg")]
    assert capsys.readouterr().out.splitlines()[-2:] == made and all(Path(one).exists() for one in made)


def test_a_run_that_ends_early_leaves_its_rows(tmp_path: Path) -> None:
    result = ResultFile(tmp_path / "r.json", {"copy_gb_s": 4000.0}, contenders("FA3,FlashInfer,TRITON"))
    result.add([row("TRITON", 10.0)])
    result.add([row("TRITON", 20.0, case="b")])
    content = json.loads((tmp_path / "r.json").read_text())
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


def test_replays_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replays = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    monkeypatch.setattr(timing, "elapsed_us", lambda some: [(one(), 1e4)[1] for one in some])
    assert timing.time_replays(replays, {"a": 1, "b": 2, "c": 4}) == {"a": 1e4, "b": 5e3, "c": 2.5e3}
    rounds = ["".join(calls[i : i + 3]) for i in range(6, len(calls), 3)]
    assert len(rounds) == math.floor(timing._SECONDS * 1e6 / 1e4) == 15
    assert rounds[:4] == ["abc", "bca", "cab", "abc"]


def test_it_is_found_in_a_checkout_and_in_an_installation(tmp_path: Path) -> None:
    assert Path(str(checkout.load("bench").__file__)) == ROOT / "bench" / "__init__.py"
    library = tmp_path / "pagedattn"
    for name in ("absent_part", "bench_part"):
        assert not (library / name).exists()
        with pytest.raises(ModuleNotFoundError):
            checkout.load(name, library)
    (tmp_path / "bench_part").mkdir()
    (tmp_path / "bench_part" / "__init__.py").write_text("HERE = 1\n")
    with pytest.raises(ModuleNotFoundError):  # beside an installed library lie other people's packages
        checkout.load("bench_part", library)
    (tmp_path / "setup.py").touch()
    assert checkout.load("bench_part", library).HERE == 1
    assert sys.modules.pop("pagedattn.bench_part").HERE == 1


def test_a_wheel_has_the_benchmark_without_its_tests(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shipped = {path.stem for path in (tmp_path / "pagedattn" / "bench").iterdir()}
    assert {"command", "measure", "peers", "plot", "workload", "__init__"} <= shipped
    here_only = "conftest test_attention test_cache gpu_test host_cost sanitize tune_decode"
    assert not shipped & {*here_only.split()}
    assert (tmp_path / "pagedattn" / "engine" / "llm.py").exists()


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
