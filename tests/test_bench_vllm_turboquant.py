"""The contender "vllm TURBOQUANT", over a stand-in for vLLM: its calls, what it is held to, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import fake_vllm_turboquant as fake
import pytest
import torch

from pagedattn.bench import measure as measuring
from pagedattn.bench import problem, timing
from pagedattn.bench.contenders import Contender, by_own_kernels, contenders
from pagedattn.bench.measure import measure
from pagedattn.bench.ratios import Row
from pagedattn.bench.table import Case

NAME = "vllm TURBOQUANT"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on a CPU")
# Of each format, bytes of a slot of vLLM's with heads of 64, and its name there.
STORED = {
    "int4": (4 * 16 + 6, "turboquant_4bit_nc"),
    "turboquant4": (4 * 16 + 6, "turboquant_4bit_nc"),
    "turboquant_k3v4": (24 + 32 + 6, "turboquant_k3v4_nc"),
    "turboquant3": (24 + 24 + 6, "turboquant_3bit_nc"),
}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)
    monkeypatch.setattr(problem, "_TOTAL_BYTES", 1)
    monkeypatch.setattr(timing, "_FEWEST", 1)
    monkeypatch.setattr(timing, "_SECONDS", 0)


def case_of(form: str = "turboquant4", **changes: Any) -> Case:
    case = Case("decode", "3q1s3..200", 4, 2, 64, dtype="float16", kv_cache_dtype=form)
    return case._replace(**changes)


def row_of(case: Case) -> Row:
    (row,) = measure(case, contenders(NAME), {})
    return row


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("size", [16, 32])
def test_it_is_held_to_its_own_cache(form: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time_replays", lambda replays, calls: dict.fromkeys(replays, 0.01))
    slot, preset = STORED[form]
    row = row_of(case := case_of(form, block_size=size))
    assert row["refused"] is None and 0 < row["error"] < 1e-3 and row["us"] == 0.01
    assert (row["kv_cache_dtype"], row["cache_kv_dtype"], row["cache_block_size"]) == (form, preset, size)
    assert row["gb_s"] == pytest.approx(sum(case.work.seq_lens) * 2 * slot / 10, abs=0.06)
    assert row["kernel"].endswith(preset) and row["ratios"] is None


def test_the_others_have_a_ratio_to_it() -> None:
    rows = measure(case_of(), contenders(f"TORCH,{NAME}"), {})
    assert [row["backend"] for row in rows] == ["TORCH", NAME]
    assert [*rows[0]["ratios"]] == [NAME] and rows[0]["cache_kv_dtype"] == "turboquant4"


def test_layers_have_caches_and_outputs_of_their_own() -> None:
    (one,), made = contenders(NAME), problem.make_problem(case_of())
    made.queries[1] = made.queries[0]
    run = one.run(made)
    first = run.attend(0)
    kept = first.clone()
    assert float((run.attend(1) - kept).abs().max()) > 0.1 and torch.equal(first, kept)


def test_many_tokens_are_stored_by_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def store(key: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(len(key))
        fake.store(key, *args, **kwargs)

    monkeypatch.setattr(sys.modules[f"{fake.OPS}store"], "triton_turboquant_store", store)
    monkeypatch.setattr("pagedattn.bench.vllm_turboquant._STORED_AT_ONCE", 64)
    row = row_of(case_of())
    assert row["refused"] is None and max(calls) == 64 and len(calls) > 2 * row["layers"]


def test_keys_stored_in_other_slots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(
        key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *rest: Any, **options: Any
    ) -> None:
        fake.store(key, value, cache, slots.roll(1), *rest, **options)

    monkeypatch.setattr(sys.modules[f"{fake.OPS}store"], "triton_turboquant_store", shifted)
    assert row_of(case_of())["refused"].startswith("wrong: stored keys differ from the rows by 1")


@pytest.mark.parametrize(
    ("side", "first", "last"), [("keys", 0, 32), ("keys", 32, 34), ("values", 34, 66), ("values", 66, 70)]
)
def test_bytes_in_another_order_are_seen(side: str, first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def store(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, *rest: Any, **options: Any) -> None:
        fake.store(key, value, cache, *rest, **options)
        cache[..., first:last] = cache[..., first:last].flip(-1)

    monkeypatch.setattr(sys.modules[f"{fake.OPS}store"], "triton_turboquant_store", store)
    assert row_of(case_of())["refused"].startswith(f"wrong: stored {side} differ from the rows by")


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {"seq_lens": call["seq_lens"] - 1},
        lambda call: {"block_table": call["block_table"].flip(0)},
        lambda call: {"query": call["query"].flip(1)},
        lambda call: {"centroids": call["centroids"].flip(0)},
        lambda call: {"scale": 1.05 * call["scale"]},
    ],
    ids=["a key less", "other blocks", "other heads", "other centroids", "another scale"],
)
def test_a_decode_of_something_else_is_seen(
    change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[f"{fake.OPS}decode"]
    monkeypatch.setattr(module, "triton_turboquant_decode_attention", lambda **call: fake.decode(**call | change(call)))
    row = row_of(case_of())
    assert row["refused"].startswith("wrong: error") and row["us"] is None and not by_own_kernels(row)


REFUSED: dict[str, dict[str, Any]] = {
    "beside caches of int4, turboquant4, turboquant_k3v4, turboquant3 only": {"kv_cache_dtype": "k8v4"},
    "one new token of each sequence": {"text": "2q1s40+1q2s40"},
    "no windows, soft caps and sinks": {"window": 30},
    "soft caps": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "a power of two, not of 96": {"dim": 96},
    "not of 48": {"block_size": 48},
    "float16 or bfloat16, not float32": {"dtype": "float32"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_does_not_serve_is_refused_before_anything_is_stored(why: str) -> None:
    (one,), made = contenders(NAME), problem.make_problem(case_of(**REFUSED[why]))
    with pytest.raises(NotImplementedError, match=why):
        one.run(made)
    assert not made._paged


@pytest.mark.parametrize("module", [f"{fake.OPS}decode", f"{fake.FORMATS}config"])
def test_without_vllm_it_is_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    row = row_of(case_of())
    assert row["refused"].startswith("it needs vLLM with its TurboQuant kernels; pip install vllm==0.24.0")


def test_it_takes_part_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contender, "available", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "FA3" in [one.name for one in contenders(None)]
    assert NAME not in [one.name for one in contenders(None)]
    assert [one.name for one in contenders(f"TORCH,{NAME}")] == ["TORCH", NAME]
