"""`pagedattn bench random`: which shapes are drawn, that they are checked with their masks, and what is timed again."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import AttentionSpec, Mask
from pagedattn.backends.registry import get_backend
from pagedattn.bench import command
from pagedattn.bench.contenders import contenders
from pagedattn.bench.measure import empty_row, measure
from pagedattn.bench.peers import fa3
from pagedattn.bench.problem import make_problem
from pagedattn.bench.random_shapes import FORMATS, KINDS, LAYERS, random_cases, seeds_of
from pagedattn.bench.ratios import Row, geometric_mean, judge, summarise
from pagedattn.bench.report import summary_lines
from pagedattn.bench.table import Case
from pagedattn.bench.workload import parse
from pagedattn.cli import main
from pagedattn.errors import InvalidInputError, UnsupportedError

HASH = "0123456789abcdef0123456789abcdef01234567"


def test_a_seed_has_the_same_cases_however_many() -> None:
    cases = random_cases(7, 200)
    assert random_cases(7, 20) == cases[:20] != random_cases(8, 20)
    assert [case.suite for case in cases] == [*KINDS] * 40
    assert {(case.heads, case.kv_heads, case.dim) for case in cases} == {*LAYERS}
    assert {case.block_size for case in cases} == {16, 32, 64, 128}
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    for name, share in (("window", 0.15), ("softcap", 0.1), ("sinks", 0.1)):
        assert 0.4 * share < sum(bool(getattr(case, name)) for case in cases) / 200 < 1.8 * share


@pytest.mark.parametrize("gpu", [True, False])
def test_kinds_and_limits(gpu: bool) -> None:
    for case in random_cases(1, 100, gpu):
        work, less = case.work, 1 if gpu else 64
        assert 4 * sum(work.seq_lens) * case.kv_heads * case.dim <= (4 << 30) / less**2 and case.flops <= 1e13 / less**2
        longest, ones = max(work.query_lens), work.num_decodes
        if case.suite == "decode":
            assert ones == len(work.seq_lens)
        elif case.suite == "mixed":
            assert 0 < ones < len(work.seq_lens)
        else:
            assert ones == 0 and len({*work.query_lens}) == 1
        if case.suite == "speculative":
            assert longest <= 16
        if case.suite == "append":
            assert 4 * longest <= min(work.seq_lens)


def test_formats_are_drawn_and_served_in_every_layer() -> None:
    cases = random_cases(5, 1000)
    stored = [case for case in cases if case.kv_cache_dtype != "auto"]
    assert 0.25 < len(stored) / 1000 < 0.35 and {case.kv_cache_dtype for case in stored} == {*FORMATS}
    assert {case.suite for case in stored} == {*KINDS}
    for layer, name in itertools.product(LAYERS, FORMATS):
        for size in (16, 32, 64, 128):
            case = Case("decode", "1q1s4k", *layer, block_size=size, kv_cache_dtype=name)
            spec = AttentionSpec(
                **{"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.dim},
                **{"dtype": torch.float16, "device_type": "cuda", "capability": (9, 0)},
                **{"block_size": case.size_of_blocks(name), "kv_cache_dtype": name, "clean_cache": True},
                **{"mask": Mask(causal=True, sliding_window=512), "softcap": 30.0, "has_sinks": True},
            )
            assert not get_backend("TRITON").rejections(spec), (layer, name, size)


def test_formats_are_measured_as_drawn_or_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Case] = []

    def stub(case: Case, *_: object) -> list[dict[str, Any]]:
        measured.append(case)
        return [{**empty_row("decode", case.text, "TORCH"), "us": 1.0}]

    monkeypatch.setattr(command, "measure", stub)
    monkeypatch.setattr(command, "ceilings", dict)
    drawn = random_cases(9, 12, torch.cuda.is_available())
    assert {case.kv_cache_dtype == "auto" for case in drawn} == {True, False}
    for asked, expected in (((), drawn), (("int8",), [case._replace(kv_cache_dtype="int8") for case in drawn])):
        command.run("random", "TORCH", [], None, plot=False, kv_cache_dtypes=asked, seed=9, count=12)
        assert measured == expected
        measured.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed for longer")
def test_a_case_without_a_peer_is_checked_and_not_averaged() -> None:
    case = Case("decode", "2q1s40", 4, 2, 64, dtype="float32", kv_cache_dtype="int4", draw="0/1")
    rows = measure(case, contenders("TORCH"), {})
    assert rows[0]["error"] < 1e-5 and rows[0]["ratio"] is None and summarise(rows) == {}


@pytest.mark.parametrize("name", ["int8", "k8v4", "int4", "turboquant4"])
def test_a_peer_that_stores_otherwise_gives_a_random_case_no_ratio(name: str) -> None:
    case = Case("decode", "2q1s40", 4, 2, 64, kv_cache_dtype=name, draw="0/1")
    with pytest.raises(UnsupportedError, match=f"no {name}"):
        fa3(make_problem(case))


def judged_row(suite: str, case: str, ratio: float | None, name: str = "TRITON", us: float | None = 1.0) -> Row:
    return {**empty_row(suite, case, name), "ratio": ratio, "us": us, "draw": f"1/{case}"}


def test_the_judgement_has_means_and_worst_rows_of_each_kind_and_what_share_is_behind() -> None:
    decodes = [judged_row("decode", case, ratio) for case, ratio in zip("abcd", (1.2, 0.94, 0.8, 1.1), strict=True)]
    decodes[3]["kv_cache_dtype"] = "fp8_e4m3"
    others = [judged_row("append", "e", 1.5), judged_row("append", "f", None), judged_row("append", "g", None, us=None)]
    found = judge(
        [*decodes, *others, judged_row("decode", "a", 0.1, "FLASHINFER"), judged_row("decode", "a", None, "FA3")]
    )
    assert (found["rows"], found["without_peer"]) == (5, 1)
    assert found["below_0.95"] == {"rows": 2, "share": 0.4} and found["below_0.90"] == {"rows": 1, "share": 0.2}
    decode, append = found["kinds"]["decode"], found["kinds"]["append"]
    assert decode["ratio"] == round(geometric_mean([1.2, 0.94, 0.8, 1.1]), 4) and decode["rows"] == 4
    assert [(one["case"], one["ratio"], one["draw"]) for one in decode["worst"]] == [
        *(("c", 0.8, "1/c"), ("b", 0.94, "1/b"), ("d", 1.1, "1/d")),
    ]
    assert decode["below_0.95"]["rows"] == 2 and append["below_0.95"] == {"rows": 0, "share": 0.0}
    first, second, last = summary_lines({"summary": {}, "judged": found})
    assert first.startswith(
        "TRITON decode: 0.998 (4 rows, 2 (50.0%) below 0.95, 1 (25.0%) below 0.90), worst 0.800 at c; "
    )
    assert second.startswith("TRITON append: 1.500 (1 rows, ")
    assert last == "TRITON in all: 5 rows, 2 (40.0%) below 0.95, 1 (20.0%) below 0.90, 1 without a peer"


def test_a_commit_has_five_seeds_by_its_full_hash() -> None:
    expected = [int(hashlib.sha256(f"{HASH}:{index}".encode()).hexdigest()[:8], 16) for index in range(5)]
    assert seeds_of(HASH) == expected and len({*expected, *seeds_of(HASH[::-1])}) == 10
    for text in (HASH[:7], HASH.upper(), HASH + "0", "HEAD"):
        with pytest.raises(InvalidInputError, match=r"--seeds-of must be a commit's full hash, 40 .* rev-parse HEAD"):
            seeds_of(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_five_seeds_from_the_command(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert main(["bench", "random", "--seeds-of", HASH, "--cases", "1", "--json", str(path)]) == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    meta, seeds = content["meta"], seeds_of(HASH)
    assert (meta["seeds"], meta["cases"], meta["seeds_of"]) == (seeds, 1, HASH)
    assert [row["draw"] for row in content["rows"]] == [f"{seed}/0" for seed in seeds]


def test_contexts_are_log_uniform() -> None:
    decodes = [case.work.seq_lens for case in random_cases(2, 1500) if case.suite == "decode" and not case.window]
    octaves = [math.log2(lens[0]) for lens in decodes]
    assert 7 <= min(octaves) < 7.5 and 14 < max(octaves) <= 16 and 9.5 < sum(octaves) / len(octaves) < 11.5
    ragged = sum(len({*lens}) > 1 for lens in decodes) / len(decodes)
    assert 0.3 < ragged < 0.6, "of half, but for those of one sequence"


def test_what_a_window_leaves() -> None:
    work = parse("1q3s10+1q1s4")
    assert work.keys_read(2) == 4 + 2 and work.keys_read(100) == 14
    assert work.flops(1, 1, 2) == 4 * (3 * 2 + 2) and work.flops(1, 1, 9) == 4 * (8 + 9 + 9 + 4)
    assert parse("1q5").flops(1, 1, 3) == 4 * (1 + 2 + 3 + 3 + 3)
    assert Case("decode", "1q1s4k", window=64).bytes_read("auto") == Case("decode", "1q1s64").bytes_read("auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed for longer")
@pytest.mark.parametrize("change", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": True}])
def test_each_is_checked_with_its_mask(change: dict[str, Any]) -> None:
    case = Case("mixed", "1q20s60+2q1s50", 4, 2, 16, dtype="float32")._replace(**change)
    (row,) = measure(case, contenders("TORCH"), {})
    assert row["refused"] is None and row["error"] < 1e-5
    assert {name: row[name] for name in ("window", "softcap", "sinks", "draw") if name in row} == change
    plain, other = (make_problem(case._replace(window=0, softcap=0.0, sinks=False)), make_problem(case))
    out = contenders("TORCH")[0].run(other)
    out.plan()
    if change:
        with pytest.raises(ArithmeticError, match="error"):
            plain.error(out.attend(0))


@pytest.mark.parametrize(
    ("given", "others", "wanted"),
    [
        ([1.2], [1.0], 1.2),
        ([0.9, 1.1, 0.94], [1.0, 1.0, 1.0], 0.94),
        ([None], [1.0], None),
        ([0.5, 0.6, 2.0], [1.0, 1.0, 1.0], 0.6),
        ([0.94, 0.92, 0.88], [0.5, 0.99, 0.98], 0.92),  # by the lowest of any contender 0.88 would be kept
        ([0.94, 0.92, 0.99], [2.0, 0.3, 0.4], 0.94),
        ([0.99], [0.3], 0.99),  # FLASHINFER through our layer may be slow: that is not ours to judge
    ],
)
def test_where_triton_is_behind_its_median_of_three_counts(
    given: list[float | None], others: list[float], wanted: float | None
) -> None:
    left = iter(zip(given, others, strict=True))

    def once() -> list[dict[str, Any]]:
        ratio, other = next(left)
        rows = [
            {**empty_row("decode", "a", name), "ratio": r} for name, r in (("FLASHINFER", other), ("TRITON", ratio))
        ]
        return [*rows, empty_row("decode", "a", "FA3")]

    kept = command.median_of_three(once)
    assert kept[1]["ratio"] == wanted and kept[0]["ratio"] == others[given.index(wanted)], "a run is kept whole"
    assert next(left, "none") == "none"
    assert kept[1].get("ratio_of_three") == (sorted(x for x in given if x) if len(given) == 3 else None)
    assert "ratio_of_three" not in kept[0]


def test_what_was_wrong_once_of_three_times_is_kept() -> None:
    runs = iter(((0.9, None), (None, "wrong: error 1"), (0.93, None)))

    def once() -> list[dict[str, Any]]:
        ratio, refused = next(runs)
        return [{**empty_row("decode", "a", "TRITON"), "ratio": ratio, "refused": refused}]

    assert command.median_of_three(once)[0]["refused"] == "wrong: error 1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_the_suite_from_the_command(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert command.run("random", None, [], path, plot=False, seed=3, count=5) == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["meta"]["judged"]["rows"] == 0 and content["meta"]["judged"]["kinds"] == {}, "TORCH has no peer"
    assert content["meta"]["seeds"] == [3] and content["meta"]["cases"] == 5 and "seeds_of" not in content["meta"]
    assert [(row["suite"], row["draw"]) for row in content["rows"]] == [(k, f"3/{i}") for i, k in enumerate(KINDS)]
    for option in ({"seed": 3}, {"commit": HASH}, {"count": 3}):
        with pytest.raises(InvalidInputError, match="used with the suite random"):
            command.run("decode", None, [], None, plot=False, **option)
    with pytest.raises(InvalidInputError, match="--seed must be left out with --seeds-of, got 3"):
        command.run("random", None, [], None, plot=False, seed=3, commit=HASH)
    with pytest.raises(InvalidInputError, match="--cases must be a positive integer"):
        command.run("random", None, [], None, plot=False, count=0)
