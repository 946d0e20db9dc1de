"""Result files become groups of bars with the right names, values, colours and ceilings, and then pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedattn.bench import result_file
from pagedattn.bench.curves import Grid, grid, panels
from pagedattn.bench.random_shapes import KINDS
from pagedattn.bench.result_file import COLOURS, FAMILIES, PALETTE, colours, groups, host_table, load, series, title

DECODE, PREFILL, MIXED, SPECULATIVE, APPEND, CACHE, LATENT = FAMILIES
COMMITTED = Path(__file__).parent.parent / "bench/results/h200/backends.json"
META = {"gpu": "NVIDIA H200", "torch": "2.11", "commit": "aaaaaaa", "date": "2026-01-02", "copy_gb_s": 4000.0}


def row(backend: str | None, workload: str = "64q1s4k", suite: str = "decode", **values: Any) -> dict[str, Any]:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": "bfloat16"}
    measured = {"us": 10.0, "gb_s": 1000.0, "tflops": 20.0, "host_us": 5.0, "plan_us": 1.0}
    return {"suite": suite, "workload": workload, "backend": backend, **shape, **measured, **values}


def write(path: Path, *rows: dict[str, Any], **meta: Any) -> Path:
    path.write_text(json.dumps({"meta": {**META, **meta}, "rows": rows}), encoding="utf-8")
    return path


def test_the_committed_result_is_grouped_as_it_was_measured() -> None:
    result = load([COMMITTED])
    content = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert {row["suite"] for row in content["rows"]} >= {"decode", "prefill", "mixed"}
    for suite, family in (("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED), ("cache", CACHE)):
        timed = [row for row in content["rows"] if row["suite"] == suite and row["us"] is not None]
        measured = sorted((row[family.value], row["us"]) for row in timed)
        assert measured == sorted(bar[1:] for group in groups(result.rows, family) for bar in group.bars)
    first = groups(result.rows, DECODE)[0]
    assert "1q1s1k" in first.label and first.bars[0][0] == "TRITON"
    assert result.meta["gpu"] == content["meta"]["gpu"]


def test_bandwidth_bounds_decode_and_cache_and_compute_the_others() -> None:
    judged = {family.suite: (family.value, family.unit, family.ceilings) for family in FAMILIES}
    bandwidth, compute = ("gb_s", "GB/s", ("copy_gb_s", "read_gb_s")), ("tflops", "TFLOP/s", ("matmul_tflops",))
    expected = dict.fromkeys(("decode", "speculative", "cache", "mla"), bandwidth)
    assert judged == expected | dict.fromkeys(("prefill", "mixed", "append"), compute)
    assert {one for family in FAMILIES for one in family.ceilings} == set(result_file.CEILINGS)


def test_a_row_without_a_value_makes_no_bar(tmp_path: Path) -> None:
    rows = (row("TRITON", gb_s=None), row("TORCH"), row("TRITON", "1q1s1k", gb_s=None))
    (group,) = groups(load([write(tmp_path / "a.json", *rows)]).rows, DECODE)
    assert group.bars == [("TORCH", 1000.0, 10.0)] and group.label == "64q1s4k"


def test_what_varies_is_in_the_labels_and_the_rest_in_the_note(tmp_path: Path) -> None:
    result = load([write(tmp_path / "a.json", row("TRITON"), row("TRITON", head_dim=64, dtype="float16"))])
    labels = [group.label for group in groups(result.rows, DECODE)]
    assert labels == ["64q1s4k\nD 128, bfloat16", "64q1s4k\nD 64, float16"]
    stored = load([write(tmp_path / "b.json", row("TRITON"), row("TRITON", kv_cache_dtype="int8"))]).rows
    assert [group.label for group in groups(stored, DECODE)] == ["64q1s4k\nauto cache", "64q1s4k\nint8 cache"]
    assert title(result.meta, "decode", stored[1:])[1].splitlines()[0].endswith("bfloat16, int8 cache")
    head, note = title({**result.meta, "peers": {"TRITON": "3.6", "ABSENT": "1"}}, "decode", result.rows)
    assert head == "decode on NVIDIA H200"
    assert note.splitlines() == [
        "32 query and 8 KV heads, blocks of 16",
        "torch 2.11, TRITON 3.6, commit aaaaaaa, 2026-01-02",
    ]


def test_rows_that_differ_by_their_mask_alone_are_told_apart(tmp_path: Path) -> None:
    masks: list[dict[str, Any]] = [{}, {"window": 512}, {"softcap": 30.0}, {"window": 512, "sinks": True}]
    masks += [{"dim_v": 128}, {"packed": True}]
    result = load([write(tmp_path / "a.json", *(row("TRITON", **mask) for mask in masks))])
    labels = [group.label.splitlines()[1:] for group in groups(result.rows, DECODE)]
    assert labels == [[], ["window 512"], ["soft cap 30"], ["window 512, sinks"], ["values of 128"], ["packed"]]
    assert title(result.meta, "decode", result.rows[1:2])[1].splitlines()[0].endswith("bfloat16, window 512")


def test_the_same_shape_drawn_twice_makes_two_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", row("TRITON", draw="0/1"), row("TRITON", draw="3/6"))
    assert len(groups(load([path]).rows, DECODE)) == 2


def test_every_kind_of_a_random_file_is_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(row("TRITON", suite=kind, draw=f"0/{i}") for i, kind in enumerate(KINDS)))
    drawn = load([path]).rows
    assert {one["suite"] for one in drawn} == {*KINDS}
    assert {family.suite for family in FAMILIES if groups(drawn, family)} == {*KINDS}


def test_files_of_one_gpu_are_joined_and_told_apart_by_commit(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", row("TRITON"), row("TORCH"))
    second = write(tmp_path / "b.json", row("TRITON", gb_s=900.0), row("OTHER"), commit="bbbbbbb", copy_gb_s=4100.0)
    result = load([second, first])
    (group,) = groups(result.rows, DECODE)
    assert group.bars == [
        ("TRITON @bbbbbbb", 900.0, 10.0),
        ("TRITON @aaaaaaa", 1000.0, 10.0),
        ("TORCH", 1000.0, 10.0),
        ("OTHER", 1000.0, 10.0),
    ]
    assert result.meta["copy_gb_s"] == 4100.0 and result.meta["commit"] == "bbbbbbb, aaaaaaa"
    chosen = colours([name for name, _, _ in group.bars])
    assert chosen["TRITON @aaaaaaa"] == chosen["TRITON @bbbbbbb"] == COLOURS["TRITON"]


def test_what_cannot_be_drawn_is_refused_with_the_file(tmp_path: Path) -> None:
    good = write(tmp_path / "a.json", row("TRITON"))
    with pytest.raises(ValueError, match="more than once"):
        load([good, good])
    with pytest.raises(ValueError, match="one GPU, got NVIDIA A100, NVIDIA H200"):
        load([good, write(tmp_path / "b.json", row("TRITON"), gpu="NVIDIA A100")])
    with pytest.raises(ValueError, match=r"c\.json has no row of append, cache, decode"):
        load([write(tmp_path / "c.json", {"suite": "tests.gpu", "passed": 4})])
    (tmp_path / "d.json").write_text("[1]", encoding="utf-8")
    for name in ("d.json", "absent.json"):
        with pytest.raises(ValueError, match=f"{name} is no result file"):
            load([tmp_path / name])


def test_versions_of_a_backend_share_its_colour_and_the_better_of_two_ways_too() -> None:
    names = ["FLASH_ATTN (FA3)", "FLASH_ATTN (FA2) @aaaaaaa", "FlashInfer (wrappers)", "FA3"]
    chosen = colours(names)
    assert chosen[names[0]] == chosen[names[1]] == COLOURS["FLASH_ATTN"]
    assert chosen["FlashInfer (wrappers)"] == COLOURS["FlashInfer"] and chosen["FA3"] == COLOURS["FA3"]


def sweep(backend: str, workload: str, **values: Any) -> dict[str, Any]:
    return row(backend, workload, "sweep", case=f"32/8/128 {workload}", **values)


def test_a_sweep_is_cut_into_batches_and_prompts() -> None:
    rows = [
        *(sweep("TRITON", f"4q1s{k}k", gb_s=100.0 * k) for k in (8, 1, 2)),
        *(sweep("FA3", "4q1s1k", gb_s=90.0), sweep("FA3", "4q1s2k", us=None), row("TRITON", "4q1s4k")),
        *(sweep("TRITON", "1q512", tflops=300.0), sweep("TRITON", "1q1s1k", gb_s=50.0)),
    ]
    one, four, prompt = panels(rows)
    assert (one.title, four.title, prompt.title) == ("decode, batch 1", "decode, batch 4", "prefill, one prompt")
    assert four.curves == {"TRITON": [(1024, 100.0), (2048, 200.0), (8192, 800.0)], "FA3": [(1024, 90.0)]}
    stored = [sweep("TRITON", "1q1s1k", gb_s=50.0, **form) for form in ({}, {"kv_cache_dtype": "int8"})]
    assert [*panels(stored)[0].curves] == ["TRITON", "TRITON (int8)"]
    assert (prompt.value, prompt.curves) == ("tflops", {"TRITON": [(512, 300.0)]})
    assert (one.value, one.curves) == ("gb_s", {"TRITON": [(1024, 50.0)]})


def test_ratios_are_a_grid_with_gaps() -> None:
    rows = [
        *(row("auto", case="a", ratio=1.2), row("TRITON", case="a", ratio=0.9), row("FA3", case="a")),
        *(row("TRITON", "8q2k", "prefill", case="b", ratio=1.0), sweep("TRITON", "1q1s1k", ratio=2.0)),
    ]
    assert grid(rows) == Grid(["decode a", "prefill b"], ["TRITON", "auto"], [[0.9, 1.2], [1.0, None]])


def test_a_backend_keeps_its_colour_and_shares_it_with_nobody() -> None:
    known = [name for name in COLOURS if name != result_file.OWN]
    assert len({COLOURS[name] for name in known}) == len(known)
    for company in (["NEW"], ["NEW", "TRITON"], ["NEW", *known], ["ELSE", "NEW", *known]):
        chosen = colours(company)
        assert len(set(chosen.values())) == len(company) and set(chosen.values()) <= {*PALETTE, *COLOURS.values()}
        assert all(chosen[name] == COLOURS[name] for name in company if name in known)
        assert chosen == colours(company[::-1])


def test_bars_of_known_backends_come_first_in_one_order() -> None:
    rows = [{"backend": name} for name in ("ZETA", "TORCH", "ALPHA", "FLASHINFER", "TRITON")]
    assert series(rows) == ["TRITON", "FLASHINFER", "TORCH", "ALPHA", "ZETA"] == series(rows[::-1])


def test_host_times_are_medians_with_their_range(tmp_path: Path) -> None:
    rows = (
        *(row("TRITON", f"{i}q1s1k", host_us=us, plan_us=None) for i, us in enumerate((7.0, 480.0, 150.4))),
        *(row("TORCH"), row("NONE", host_us=None), row("TRITON", suite="prefill", host_us=1e6)),
    )
    assert host_table(load([write(tmp_path / "a.json", *rows)]).rows) == [
        ("TRITON", "150 (7.0 to 480)", "not measured"),
        ("TORCH", "5.0 (5.0 to 5.0)", "1.0 (1.0 to 1.0)"),
    ]


def test_numbers_are_printed_short() -> None:
    assert [result_file.short(value) for value in (0.24, 99.9, 100.4, 4333.2)] == ["0.2", "99.9", "100", "4333"]
    assert [result_file.time_text(us) for us in (2.46, 7761.0, 604681.9)] == ["2.5 µs", "7761 µs", "605 ms"]


def test_files_that_measured_other_suites_need_no_commits_in_labels(tmp_path: Path) -> None:
    rows = load([COMMITTED, COMMITTED.with_name("sweep.json")]).rows
    assert {row["suite"] for row in rows} >= {"decode", "sweep"} and not [r for r in rows if "@" in r["backend"]]


def test_the_committed_pictures_name_their_ceilings_and_no_commit_but_in_the_note() -> None:
    folder = COMMITTED.parent / "plots"
    for name in ("decode", "prefill", "mixed", "cache", "sweep"):
        text = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert "ceiling: " in text and "@" not in text and text.count("ace3788") == 1, name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.suite)
def test_nothing_is_cut_or_printed_over_something_else(family: result_file.Family) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from pagedattn.bench import plot

    result = load([COMMITTED])
    if family in (SPECULATIVE, APPEND, LATENT):  # of which the file has none
        decodes = [one for one in result.rows if one["suite"] == "decode"]
        result = result._replace(rows=[{**one, "suite": family.suite} for one in decodes])
    table = host_table(result.rows) if family is DECODE else []
    with rc_context(plot._LOOK):
        figure = plot.bar_figure(groups(result.rows, family), family, result, table)
        FigureCanvasAgg(figure).draw()
    width, height = figure.get_size_inches()
    assert height < 1.3 * width < 20
    above, *others = figure.axes
    bars, tables = (others[: len(others) - bool(table)], others[len(others) - bool(table) :])
    legend = above.get_legend()
    ceilings = {line.get_linestyle() for axes in bars for line in axes.get_lines()}
    assert ceilings == {line.get_linestyle() for line in legend.get_lines()} and len(ceilings) == len(family.ceilings)
    notes = [(axes, text) for axes in bars for text in axes.texts]
    assert len(notes) == sum(len(group.bars) for group in groups(result.rows, family))
    for axes, text in notes:
        lines = [axes.transData.transform((line.get_xdata()[0], 0))[0] for line in axes.get_lines()]
        assert text.get_window_extent().x0 > max(lines)
    boxes = [text.get_window_extent() for axes in tables for text in axes.texts]
    assert len(boxes) == 3 * (len(table) + bool(table))
    boxes += [text.get_window_extent() for _, text in notes] + [legend.get_window_extent()]
    boxes += [label.get_window_extent() for axes in bars for label in axes.get_yticklabels()]
    for i, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0 < figure.bbox.y1
        assert not [other for other in boxes[:i] if box.overlaps(other)]


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")
    from pagedattn.bench import plot

    rows = [row("TRITON", suite=family.suite, us=248.4, gb_s=4333.2) for family in FAMILIES]
    bars = write(tmp_path / "a.json", *rows, row("TORCH"), read_gb_s=4468.0, matmul_tflops=748.0)
    assert plot.main([str(bars), "--out", str(tmp_path / "new/folder")]) == 0
    made = {path.name: path for path in (tmp_path / "new/folder").iterdir()}
    assert set(made) == {f"{family.suite}.{kind}" for family in FAMILIES for kind in ("png", "svg")}
    assert set(map(str, made.values())) == set(capsys.readouterr().out.split())
    assert all(made[name].read_bytes().startswith(b"\x89PNG") for name in made if name.endswith("png"))
    decode, prefill = made["decode.svg"].read_text(encoding="utf-8"), made["prefill.svg"].read_text(encoding="utf-8")
    for text in ("4333  (248 µs)", "64q1s4k", "copy 4000", "read 4468", "decode on NVIDIA H200", "host µs", "5.0 (5.0"):
        assert text in decode, text
    assert "matrix product 748" in prefill and "copy" not in prefill and "host" not in prefill
    assert COLOURS["TRITON"].lower() in decode and COLOURS["TORCH"] in decode
    rows = [sweep("TRITON", text, ratio=1.1) for text in ("1q1s1k", "1q1s2k", "4q1s1k", "1q512")]
    synthetic = write(tmp_path / "b.json", *rows, row("auto", case="64q1s4k", ratio=1.25), matmul_tflops=700.0)
    assert plot.main([str(synthetic), "--out", str(tmp_path)]) == 0
    assert set(capsys.readouterr().out.split()) == {
        str(tmp_path / f"{name}.{kind}") for name in ("decode", "sweep", "ratios") for kind in ("png", "svg")
    }
    curves, ratios = (tmp_path / f"{name}.svg" for name in ("sweep", "ratios"))
    assert all(
        text in curves.read_text(encoding="utf-8")
        for text in ("decode, batch 4", "prefill, one prompt", "ceiling: copy 4000", "matrix product 700", "TRITON")
    )
    assert all(
        text in ratios.read_text(encoding="utf-8")
        for text in ("1.25", "decode 64q1s4k", "auto", "ratios on NVIDIA H200")
    )
    assert plot.main([str(tmp_path / "absent.json"), "--out", str(tmp_path)]) == 2
    assert "absent.json is no result file" in capsys.readouterr().err
