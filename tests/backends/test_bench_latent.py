"""The suite of latent attention: its table, and each contender with stand-ins for the other libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fake_flash_mla
import fake_flashinfer
import pytest
import torch
from fake_flash_attn import CALLS, MODULES
from flashinfer_on_cpu import install

from pagedattn import Mask
from pagedattn.backends import selector
from pagedattn.backends.flash_attn import versions as versions
from pagedattn.backends.flash_mla import backend as flash_mla_backend
from pagedattn.backends.flash_mla import metadata as flash_mla_metadata
from pagedattn.bench import contenders as listed
from pagedattn.bench import flash_mla_library, peers, problem, timing
from pagedattn.bench import measure as measuring
from pagedattn.bench.contenders import LATENT_ALL, contenders
from pagedattn.bench.measure import FIELDS, measure
from pagedattn.bench.report import header, line
from pagedattn.bench.table import Case, cases, latent_cases
from pagedattn.cli import command
from pagedattn.errors import InvalidInputError
from pagedattn.testing import attention_oracle

CASE = Case("mla", "3q1s40..120", 4, 1, 576, 16, dtype="float16", latent=512)
SEVERAL = CASE._replace(text="2q2s60+1q2s70")
TABLE = {  # heads, block size: workloads
    **{(n, 64): "1q1s8k 64q1s4k 256q1s1k 16q1s32k 64q1s500*1.07 64q2s4k 64q4s4k" for n in (128, 64, 16, 8)},
    **{(n, 16): "64q1s4k 64q1s500*1.07" for n in (128, 16)},
    **{(n, 16): "64q1s4k" for n in (64, 8)},
    **{(n, 32): "64q1s4k" for n in (128, 64, 16, 8)},
}
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on a CPU")


@pytest.fixture
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA, FlashAttention-3 and FlashInfer are here, and serve a CPU."""
    install(monkeypatch)
    for name, module in {**MODULES[3], "flash_mla": fake_flash_mla.MODULE}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "_installed", lambda name: sys.modules.get(name) is not None)
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    monkeypatch.setattr(peers, "_WORKSPACE_BYTES", 1 << 16)
    monkeypatch.setattr(problem, "_TOTAL_BYTES", 1)  # two layers
    monkeypatch.setattr(timing, "_FEWEST", 1)
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(measuring, "host_us", lambda call: (call(), 1.5)[1])
    found = (flash_mla_backend._availability, flash_mla_metadata.library)
    for cached in (versions.library, peers.workspace, *found):
        cached.cache_clear()
    CALLS.clear()


def test_the_table_is_what_was_agreed() -> None:
    found: dict[tuple[int, int], list[str]] = {}
    for case in cases("mla", gpu=True):
        if case.by_layer:  # tests/test_bench_latent_layer.py has those
            continue
        assert (case.kv_heads, case.dim, case.latent, case.dtype) == (1, 576, 512, "bfloat16")
        found.setdefault((case.heads, case.block_size), []).append(case.text)
    assert {shape: sorted(texts) for shape, texts in found.items()} == {
        shape: sorted(texts.split()) for shape, texts in TABLE.items()
    }
    assert cases("mla", gpu=True)[0].layer == "128/512+64" and CASE.layer == "4/512+64 float16 blocks of 16"
    lens = cases("mla", gpu=True)[4].work.seq_lens
    assert (len(lens), lens[0]) == (64, 500) and 35_000 < lens[-1] < 36_000


def test_work_is_that_of_rows_which_are_keys_and_values_at_once() -> None:
    case = Case("mla", "2q1s100", 16, 1, 576, 64, latent=512)
    assert case.bytes_read("auto") == 200 * 576 * 2
    assert case.flops == 200 * 16 * 2 * (576 + 512)
    assert case.scale == 192**-0.5


def test_heads_choose_rows_and_name_a_workloads() -> None:
    found = latent_cases([], [16, 8], gpu=True)
    assert {case.heads for case in found} == {16, 8} and sum(not case.by_layer for case in found) == 10 + 9
    asked = latent_cases(["2q1s64"], [96, 3], gpu=True)
    assert [(case.heads, case.text, case.dim, case.suite) for case in asked] == [
        (96, "2q1s64", 576, "mla"),
        (3, "2q1s64", 576, "mla"),
    ]
    assert [case.heads for case in latent_cases(["2q1s64"], [], gpu=True)] == [128]
    with pytest.raises(InvalidInputError, match="--heads must be one of 128, 64, 16, 8, got 12"):
        latent_cases([], [12], gpu=True)


@CPU_ONLY
@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("case", [CASE, SEVERAL], ids=["decodes", "several tokens"])
def test_all_are_checked_timed_and_compared(case: Case) -> None:
    rows = measure(case, LATENT_ALL, {"copy_gb_s": 4000.0})
    found = {row["backend"]: row for row in rows}
    assert [*found] == [one.name for one in LATENT_ALL] and {"FLASH_MLA", "FlashMLA", "FA3 (qv)"} <= {*found}
    for name, row in found.items():
        assert set(row) == set(FIELDS) and row["refused"] is None, (name, row["refused"])
        assert row["us"] > 0 and row["plan_us"] >= 0 and row["host_us"] > 0 and 0 < row["error"] < 2e-3
        assert row["cache_block_size"] == (64 if name in ("FlashMLA", "FLASH_MLA") else 16) and row["layers"] == 2
        assert (row["num_heads"], row["num_kv_heads"], row["head_dim"], row["block_size"]) == (4, 1, 576, 16)
    ratios = found["TRITON"]["ratios"]
    assert {*ratios} == {"FlashMLA", "FA3", "FlashInfer"} and found["TRITON"]["ratio"] == min(ratios.values())
    assert "MLA decode kernel" in found["TRITON"]["kernel"] and found["FlashInfer (MLA)"]["kernel"].endswith(", fa2")
    schedules = [call["schedule"] for call in CALLS if call["call"] == "fa3 paged"]
    assert schedules and all(schedule is not None for schedule in schedules)
    shown = line({**found["TRITON"], "case": "short"})
    end = header("mla").index("FlashMLA") + len("FlashMLA")
    assert shown[:end].split()[-1] == f"{ratios['FlashMLA']:.3f}" and "FlashMLA" not in header("decode")


def decode_fp8(query: torch.Tensor, rows: torch.Tensor, latent: int, lengths: Any, table: Any, *rest: Any) -> Any:
    """As FlashMLA's operator over e4m3 rows is called."""
    scale, causal, schedule, splits, *scales = rest
    assert query.dtype == rows.dtype == torch.float8_e4m3fn and causal and (schedule, splits) == ("schedule", "splits")
    assert [float(one) for one in scales] == [1.0, 1.0]
    outs = []
    for one, blocks, length in zip(query, table, lengths.tolist(), strict=True):
        keys = rows.view(torch.uint8)[blocks.long()].view(rows.dtype).float().flatten(0, 1)[:length]
        mask = Mask(causal=True)
        outs.append(attention_oracle(one.float(), keys, keys[..., :latent], scale=scale, mask=mask)[0].half())
    return torch.stack(outs), None


@CPU_ONLY
@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_ds_mla"])
def test_formats_are_compared_with_16_bit_and_with_flash_mla_over_e4m3(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_mla_library, "fp8_operators", lambda: (lambda *_: ("schedule", "splits"), decode_fp8))
    case = CASE._replace(kv_cache_dtype=stored)
    rows = {row["backend"]: row for row in measure(case, contenders("TRITON,FlashMLA,FA3 (qv)", "mla"), {})}
    read = {name: row["cache_kv_dtype"] for name, row in rows.items() if row["refused"] is None}
    assert read == {"TRITON": stored, "FlashMLA": "fp8_e4m3", "TRITON auto": "auto"}
    assert "16 bit" in rows["FA3 (qv)"]["refused"]
    assert rows["TRITON"]["error"] < 2e-3 < rows["FlashMLA"]["error"] < 0.1, "its queries have three bits of mantissa"
    assert {*rows["TRITON"]["ratios"]} == {"FlashMLA", "TRITON auto"}


@CPU_ONLY
@pytest.mark.usefixtures("_libraries")
def test_each_step_plans_for_its_own_lengths() -> None:
    by_name, made = {one.name: one for one in LATENT_ALL}, problem.make_problem(CASE)
    on_device = ("FlashMLA", "FLASH_MLA", "FA3 (qv)", "FLASH_ATTN (FA3)")
    for name in (*on_device, "FlashInfer (MLA)", "FLASHINFER", "TRITON"):
        run = by_name[name].run(made)
        assert (run.step is run.plan) == (name in on_device), name
    run = by_name["FlashMLA"].run(made)
    before = fake_flash_mla.schedules
    run.plan()
    run.attend(0)
    run.attend(1)
    assert fake_flash_mla.schedules == before + 1
    run.plan()
    run.attend(0)
    assert fake_flash_mla.schedules == before + 2
    planned = fake_flashinfer.plans
    run = by_name["FlashInfer (MLA)"].run(made)
    run.plan()
    run.attend(0)
    run.attend(1)
    assert fake_flashinfer.plans == planned + 1


@CPU_ONLY
@pytest.mark.usefixtures("_libraries")
def test_a_wrong_output_of_one_head_is_seen() -> None:
    made = problem.make_problem(SEVERAL)
    run = next(one for one in LATENT_ALL if one.name == "TORCH").run(made)
    run.plan()
    out = run.attend(0)
    assert made.error(out) < 2e-3
    out[-1, 2] *= 1.1
    with pytest.raises(ArithmeticError, match="where a naive implementation has"):
        made.error(out)


@CPU_ONLY
@pytest.mark.usefixtures("_libraries")
def test_who_cannot_take_part_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    flash_mla_metadata.library.cache_clear()
    monkeypatch.setitem(selector.LATENT_PRIORITY, "cpu", ("TRITON", "TORCH"))
    rows = {row["backend"]: row for row in measure(CASE, contenders("auto,FlashMLA", "mla"), {})}
    assert rows["FlashMLA"]["refused"].startswith("FlashMLA (flash_mla) cannot be loaded: ")
    assert rows["auto"]["us"] is not None and "MLA decode kernel" in rows["auto"]["kernel"]
    ragged = measure(CASE._replace(text="1q1s40+1q2s50"), contenders("FA3", "mla"), {})
    assert "as many new tokens, got [1, 2]" in ragged[0]["refused"]


@CPU_ONLY
def test_contenders_are_those_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.name for one in contenders(None, "mla")] == ["TORCH", "TORCH (absorbed)", "TORCH (expanded)"]
    assert [one.name for one in contenders("FA3,TRITON,FlashMLA", "mla")] == [
        *("TRITON", "FlashMLA", "FA3 (qv)"),
        *("TRITON (absorbed)", "TRITON (expanded)", "FA3 (expanded)"),
    ]
    assert [one.name for one in contenders("FLASHINFER,FLASH_ATTN", "mla")] == ["FLASH_ATTN (FA3)", "FLASHINFER"]
    monkeypatch.setattr(listed, "backend_names", lambda: ["TRITON", "MINE"])
    (other,) = contenders("MINE", "mla")
    assert other.prepare is listed.through_backend
    with pytest.raises(InvalidInputError, match=r"--backends must be of TRITON, auto, FLASH_MLA, FLASH_ATTN \(FA3\)"):
        contenders("FLASHMLA", "mla")


@CPU_ONLY
def test_a_run_from_the_command_to_the_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0)
    file = tmp_path / "mla.json"
    assert command.main(["bench", "mla", "--heads", "4", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith(header("mla"))
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    forms = [("mla prefill", f"4/512+64 {text}", None) for text in ("1q5s70", "1q40s130") for _ in range(2)]
    assert [(row["suite"], row["case"], row["refused"]) for row in rows] == [
        ("mla", "4/512+64 3q1s40..120", None),
        ("mla", "4/512+64 2q2s60", None),
        *forms,
    ]
    assert all(0 < row["error"] < 1e-5 for row in rows)
    assert command.main(["bench", "mla", "--workload", "2q1s9", "--heads", "3", "--heads", "2"]) == 0
    assert [text.split()[1] for text in capsys.readouterr().out.splitlines()[1:]] == ["3/512+64", "2/512+64"]
    for argv, text in {
        ("bench", "decode", "--heads", "8"): "--heads must be used with the suite mla, got the suite decode",
        ("bench", "mla", "--heads", "5"): "--heads must be one of 4, got 5; name a --workload",
        ("bench", "mla", "--kv-cache-dtype", "int8"): "--kv-cache-dtype must be of auto, fp8_e4m3, fp8_ds_mla",
    }.items():
        assert command.main(argv) == 2
        assert text in capsys.readouterr().err


def test_the_operators_alone_make_the_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.delenv(flash_mla_library.VARIABLE, raising=False)
    flash_mla_library.provide()
    assert "flash_mla" not in sys.modules and not loaded
    monkeypatch.setenv(flash_mla_library.VARIABLE, "mla.so")
    flash_mla_library.provide()
    module = sys.modules["flash_mla"]
    assert loaded == ["mla.so"]
    seen: list[tuple[Any, ...]] = []

    def operator(*args: Any) -> tuple[Any, ...]:
        seen.append(args)
        return "out", "lse", "schedule", "splits"

    monkeypatch.setattr(flash_mla_library, "_operator", lambda: operator)
    schedule, splits = module.get_mla_metadata()
    q = torch.empty(1, 1, 1, 576)
    for _ in range(2):
        got = module.flash_mla_with_kvcache(q, "rows", "table", "lens", 512, schedule, splits, 0.5, True)
        assert got == ("out", "lse")
    assert [one[1:] for one in seen] == [
        ("rows", 512, "lens", "table", 0.5, True, None, None, None),
        ("rows", 512, "lens", "table", 0.5, True, "schedule", "splits", None),
    ]
    monkeypatch.delitem(sys.modules, "flash_mla")


def test_no_second_module_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.MODULE)
    monkeypatch.setenv(flash_mla_library.VARIABLE, "mla.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded beside the package"))
    flash_mla_library.provide()
    assert sys.modules["flash_mla"] is fake_flash_mla.MODULE
