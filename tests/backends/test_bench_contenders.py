"""Every contender of the benchmark, with stand-ins for the other libraries: the right calls, and right answers only."""

from __future__ import annotations

import sys
from typing import Any

import fake_flashinfer
import pytest
import torch
from fake_flash_attn import CALLS, MODULES
from flashinfer_on_cpu import install

from pagedattn.backends import selector
from pagedattn.backends.flash_attn import versions as versions
from pagedattn.bench import contenders as listed
from pagedattn.bench import measure as measuring
from pagedattn.bench import peers, problem, timing
from pagedattn.bench.contenders import ALL, contenders
from pagedattn.bench.measure import FIELDS, measure
from pagedattn.bench.ratios import summarise
from pagedattn.bench.table import Case

CASES = {
    "decode": Case("decode", "3q1s40..120", 8, 2, 64, dtype="float16"),
    "prefill": Case("prefill", "2q33+1q7s50", 8, 2, 64, dtype="float16"),
    "mixed": Case("mixed", "1q20s64+2q1s100", 8, 2, 64, dtype="float16"),
}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on a CPU")
FLASHINFER = {"FLASHINFER", "FlashInfer (wrappers)", "FlashInfer (persistent)"}


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 and 3 and FlashInfer are here, and serve a CPU."""
    install(monkeypatch)
    for name, module in {**MODULES[2], **MODULES[3]}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "_installed", lambda name: sys.modules.get(name) is not None)
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    monkeypatch.setattr(peers, "_WORKSPACE_BYTES", 1 << 16)
    # What is interpreted takes its time: two layers, two replays, one call on the host.
    monkeypatch.setattr(problem, "_TOTAL_BYTES", 1)
    monkeypatch.setattr(timing, "_FEWEST", 1)
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(measuring, "host_us", lambda call: (call(), 1.5)[1])
    for cached in (versions.library, peers.workspace, peers._persistent):
        cached.cache_clear()
    CALLS.clear()


@pytest.mark.parametrize("suite", CASES)
def test_all_are_checked_timed_and_compared(suite: str) -> None:
    told: list[str] = []
    every = [one for one in ALL if one.name != "vllm TURBOQUANT"]  # over formats alone: test_bench_vllm_turboquant.py
    rows = measure(CASES[suite], every, {"copy_gb_s": 4000.0, "matmul_tflops": 700.0}, told.append)
    assert [row["backend"] for row in rows] == [one.name for one in every] == told[:-1]
    for row in rows:
        assert set(row) == set(FIELDS) and row["refused"] is None, (row["backend"], row["refused"])
        assert row["us"] > 0 and row["plan_us"] >= 0 and row["host_us"] > 0 and 0 < row["error"] < 1e-3
        assert row["cache_block_size"] == (256 if row["backend"] == "FLASH_ATTN (FA2)" else 16) and row["layers"] == 2
        assert row["copy_percent"] is not None and row["matmul_percent"] is not None and row["read_percent"] is None
    found = {row["backend"]: row for row in rows}
    best = min(found[name]["us"] for name in FLASHINFER - {"FLASHINFER"})
    ours, fa3 = found["TRITON"], found["FA3"]["us"]
    assert ours["ratios"] == pytest.approx(
        {"FA3": fa3 / ours["us"], "FlashInfer": best / ours["us"]}, rel=1e-3, abs=1e-4
    )
    assert ours["ratio"] == min(ours["ratios"].values()) and found["FA3"]["ratio"] is None
    assert {*summarise(rows)} == {one.name for one in every if not one.peer}
    assert "FA2" in found["FLASH_ATTN (FA2)"]["kernel"] and "FA3" in found["FLASH_ATTN (FA3)"]["kernel"]
    schedules = [call["schedule"] for call in CALLS if call["call"] == "fa3 paged"]
    assert schedules and all(schedule is not None for schedule in schedules)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.grid)])
def test_a_format_is_compared_with_the_rows_before_it_and_with_fp8_of_fa3(name: str) -> None:
    case = CASES["mixed"]._replace(kv_cache_dtype=name)
    rows = {row["backend"]: row for row in measure(case, contenders("TRITON,TORCH,FA3,FlashInfer"), {})}
    read = {"TRITON": name, "TORCH": name, "FA3": "fp8_e4m3", "TRITON auto": "auto"}
    assert {*rows} == {*read, "FlashInfer (wrappers)", "FlashInfer (persistent)"}
    assert {row["kv_cache_dtype"] for row in rows.values()} == {name}
    for backend, form in read.items():
        row = rows[backend]
        assert set(row) == {*FIELDS, "kv_cache_dtype", "cache_kv_dtype"} and row["refused"] is None, row["refused"]
        assert row["cache_kv_dtype"] == form and row["case"] == f"8/2/64 float16 {name} 1q20s64+2q1s100"
        assert row["gb_s"] == pytest.approx(case.bytes_read(form) / row["us"] / 1e3, abs=0.06)
        assert 0 < row["error"] < 1e-3 or (backend == "FA3" and 0.01 < row["error"] < 0.1)
    ours, others = rows["TRITON"], {one: rows[one]["us"] / rows["TRITON"]["us"] for one in ("FA3", "TRITON auto")}
    assert ours["ratios"] == pytest.approx(others, rel=1e-3, abs=1e-4) and ours["ratio"] == ours["ratios"]["FA3"]
    assert rows["TRITON auto"]["ratios"] is None and [*summarise(rows.values())] == [
        f"TRITON ({name})",
        f"TORCH ({name})",
    ]
    assert all("16-bit caches only" in rows[one]["refused"] for one in {*rows} - {*read})
    assert [*measure(case, contenders("TRITON"), {})[0]["ratios"]] == ["TRITON auto"]


@pytest.mark.parametrize("change", [{"dim_v": 32, "kv_heads": 8}, {"packed": True}, {"packed": True, "dim_v": 32}])
def test_values_of_another_size_and_packed_keys(change: dict[str, Any]) -> None:
    case = CASES["prefill"]._replace(**change)
    rows = {row["backend"]: row for row in measure(case, contenders("TRITON,TORCH,FA3,FlashInfer"), {})}
    for name in ("TRITON", "TORCH", "FA3"):
        assert rows[name]["refused"] is None and 0 < rows[name]["error"] < 1e-3, (name, rows[name]["refused"])
        assert all(rows[name][one] == value for one, value in change.items() if one != "kv_heads")
    assert ("varlen" in rows["FA3"]["kernel"]) == case.packed and rows["TRITON"]["ratios"].keys() == {"FA3"}
    assert all("one head dimension only" in row["refused"] for name, row in rows.items() if "FlashInfer" in name)
    assert case.flops == CASES["prefill"].flops * (64 + (case.dim_v or 64)) / 128


def test_packed_keys_have_no_format() -> None:
    rows = measure(CASES["prefill"]._replace(packed=True, kv_cache_dtype="int8"), contenders("TRITON,FA3"), {})
    assert all("no cache stores them" in row["refused"] for row in rows)


def test_fa3_schedules_once_in_each_step_and_flashinfer_plans_outside() -> None:
    by_name, mixed = {one.name: one for one in ALL}, problem.make_problem(CASES["mixed"])
    for name in ("FA3", "FLASH_ATTN (FA3)"):
        run = by_name[name].run(mixed)
        assert run.step is run.plan
    for name in FLASHINFER:
        run = by_name[name].run(mixed)
        before = fake_flashinfer.plans
        run.plan()
        planned = fake_flashinfer.plans
        if run.step is not None:
            run.step()
        run.attend(1)
        assert planned - before in (1, 2) and fake_flashinfer.plans == planned


def test_the_layer_chooses_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selector.PRIORITY, "cpu", {"prefill": ("FLASH_ATTN",), "decode": ("TRITON",)})
    (row,) = measure(CASES["mixed"], contenders("auto"), {})
    assert row["us"] is not None and "decode: " in row["kernel"] and "prefill: FA3" in row["kernel"]


def test_who_is_wrong_or_fails_is_not_timed_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    def close(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return honest(q, *args, **kwargs) * 1.01

    honest = MODULES[3]["flash_attn_interface"].flash_attn_with_kvcache
    monkeypatch.setattr(MODULES[3]["flash_attn_interface"], "flash_attn_with_kvcache", close)
    monkeypatch.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan", broken)
    rows = {row["backend"]: row for row in measure(CASES["decode"], ALL, {})}
    for name in ("FA3", "FLASH_ATTN (FA3)"):
        assert rows[name]["us"] is None and rows[name]["refused"].startswith("wrong: error 1.0")
    assert rows["FlashInfer (wrappers)"]["refused"] == "no kernel image is available"
    assert rows["TRITON"]["us"] and [*rows["TRITON"]["ratios"]] == ["FlashInfer"]
    nan = measure(CASES["decode"], [listed.Contender("NAN", _nan)], {})
    assert nan[0]["refused"] == "wrong: outputs that are not finite"


def _nan(contender: listed.Contender, problem: Any) -> listed.Run:
    run = listed.through_layer(contender, problem)
    return run._replace(attend=lambda layer: run.attend(layer).fill_(float("nan")))


def test_a_version_is_asked_for_only_while_its_layer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", "3")
    with listed.chosen("2"):
        assert versions.env.flash_attn_version() == 2
    assert versions.env.flash_attn_version() == 3
    monkeypatch.delenv("PAGEDATTN_FLASH_ATTN")
    with pytest.raises(ZeroDivisionError), listed.chosen("2"):
        raise ZeroDivisionError
    assert versions.env.flash_attn_version() is None
    assert all(one.available() for one in ALL)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert [one.name for one in ALL if not one.available()] == ["FLASH_ATTN (FA3)", "FA3"]


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows = measure(CASES["decode"], contenders("FA3,FlashInfer"), {})
    fa3, *flashinfer = (row["refused"] for row in rows)
    modules = "flash_attn_3.flash_attn_interface or flash_attn_interface"
    assert fa3.startswith(f"FA3 needs the module {modules}, which is not installed; build it")
    hint = "which is not installed; pip install flashinfer-python"
    assert flashinfer == [f"FlashInfer needs the module flashinfer, {hint}"] * 2


def test_caches_of_one_block_size_are_not_asked_for_another() -> None:
    case = CASES["prefill"]._replace(block_size=64)
    rows = {row["backend"]: row for row in measure(case, contenders("FLASH_ATTN"), {})}
    assert "blocks of 256 only" in rows["FLASH_ATTN (FA2)"]["refused"]
    assert rows["FLASH_ATTN (FA3)"]["cache_block_size"] == 64
