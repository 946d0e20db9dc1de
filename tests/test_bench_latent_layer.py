"""Cases of a latent layer in `pagedattn bench mla`: both of its forms on a CPU, and where one takes less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import command as bench_command
from pagedattn.bench import problem, timing
from pagedattn.bench.contenders import LATENT_FORMS, contenders
from pagedattn.bench.latent_layer import flops, through_latent_layer
from pagedattn.bench.measure import empty_row
from pagedattn.bench.problem import make_problem
from pagedattn.bench.ratios import break_evens
from pagedattn.bench.report import summary_lines
from pagedattn.bench.table import LATENT, LATENT_PREFILL, Case, cases
from pagedattn.cli import command
from pagedattn.layers.mla_forms import LatentDims

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")


def _small() -> list[Case]:
    return [case for case in cases(LATENT, gpu=False) if case.by_layer]


@CPU_ONLY
def test_both_forms_are_rows_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(timing, "_FEWEST", 1)
    monkeypatch.setattr(problem, "_TOTAL_BYTES", 1)
    monkeypatch.setattr(bench_command, "ceilings", dict)
    file, formats = tmp_path / "r.json", ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8"]
    assert command.main(["bench", "mla", "--json", str(file), *formats]) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {row["backend"] for row in content["rows"] if row["suite"] == LATENT} == {"TORCH"}
    rows = [row for row in content["rows"] if row["suite"] == LATENT_PREFILL]
    assert [(row["workload"], row.get("kv_cache_dtype"), row["backend"]) for row in rows] == [
        (case.text, name, f"TORCH ({form})")
        for case in _small()
        for name in (None, "fp8_e4m3")
        for form in ("absorbed", "expanded")
    ]
    for row in rows:
        assert row["refused"] is None and row["us"] > 0 and row["error"] < 1e-5 and row["peak_bytes"] is None
        assert (row["backend"].partition("(")[2][:-1] + ":") in row["kernel"]
        assert f"1q{row['new_tokens']}s{row['keys']}" == row["workload"]
    assert {*content["meta"]["break_even"]} == {"TORCH, 4 heads, 70 keys", "TORCH, 4 heads, 130 keys"}


@CPU_ONLY
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_form_that_is_wrong_is_seen(form: str) -> None:
    one = make_problem(_small()[1])
    run = through_latent_layer(one, form, "TORCH")
    right = run.attend(0)
    assert right.shape == (40, 4, 128) and one.error(right, run.block_size) < 1e-5
    with pytest.raises(ArithmeticError):
        one.error(right.flip(1), run.block_size)


def test_forms_multiply_as_often_where_arithmetic_has_them_break_even() -> None:
    even = LatentDims(128, 512, 64, 128, 128).break_even
    for tokens in (even - 1, even):
        case = Case(LATENT_PREFILL, f"1q{tokens}s32k", 128, 1, 576, 64, latent=512)
        assert (flops(case, "expanded") < flops(case, "absorbed")) == (tokens == even)


def test_the_table_has_cases_on_both_sides_of_that() -> None:
    table = [case for case in cases(LATENT, gpu=True) if case.by_layer]
    found = {(case.heads, case.work.seq_lens[0]): [] for case in table}
    for case in table:
        found[case.heads, case.work.seq_lens[0]].append(case.work.query_lens[0])
    counts = [32, 64, 128, 171, 256, 512, 2048]
    contexts = {(heads, keys): counts for heads in (128, 16) for keys in (8192, 32768)}
    assert found == contexts | {(128, 131072): [2048]}
    assert {case.suite for case in cases(LATENT, gpu=True)} == {LATENT, LATENT_PREFILL}


def test_a_peer_is_compared_with_the_layer_and_kernels_are_with_kernels() -> None:
    layer, kernel = (next(case for case in cases(LATENT, gpu=False) if case.by_layer == one) for one in (True, False))
    assert {one.name for one in LATENT_FORMS if one.peer} == {"FA3 (expanded)"}
    named = contenders("TRITON", LATENT)
    assert [one.name for one in named if one.takes(layer)] == ["TRITON (absorbed)", "TRITON (expanded)"]
    assert [one.name for one in named if one.takes(kernel)] == ["TRITON"]
    assert not any(one.takes(layer) for one in contenders("FlashMLA", LATENT))


def test_break_evens_are_where_the_expanded_form_stays_ahead() -> None:
    def rows(tokens: int, absorbed: float, expanded: float | None, heads: int = 16) -> list[dict[str, Any]]:
        both = {"TRITON (absorbed)": absorbed, "TRITON (expanded)": expanded}
        shape = {"num_heads": heads, "new_tokens": tokens, "keys": 8192}
        return [empty_row(LATENT_PREFILL, "a", name) | shape | {"us": us} for name, us in both.items()]

    found = [*rows(64, 1, 0.5), *rows(128, 1, 2), *rows(256, 3, 2), *rows(512, 5, 3), *rows(2048, 9, None)]
    assert break_evens([*found, *rows(64, 1, 2, heads=8), empty_row(LATENT, "b", "TRITON")]) == {
        "TRITON, 16 heads, 8192 keys": 256,
        "TRITON, 8 heads, 8192 keys": None,
    }
    lines = summary_lines({"summary": {}, "break_even": break_evens(found)})
    assert lines == ["TRITON, 16 heads, 8192 keys: expanded takes less from 256 new tokens on"]
