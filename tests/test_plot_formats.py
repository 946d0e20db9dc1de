"""Pictures of cache formats: what is drawn is what the committed files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")

from pagedattn.bench import plot_formats

ROOT = Path(__file__).parent.parent
DECODES, ACCURACY = (ROOT / "bench/results" / name for name in ("h200/decode_codes.json", "cpu/accuracy.json"))
LOSSES = [ACCURACY, *(ACCURACY.with_stem(f"accuracy_{name}") for name in ("int4", "turboquant", "window"))]
PICTURES = {"formats_decode.svg": [DECODES], "formats_accuracy.svg": LOSSES}


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_decode_is_a_point_by_its_bytes() -> None:
    rows = content(DECODES)["rows"]
    points = plot_formats.decode_points(rows)
    assert [*points] == ["auto", "fp8_e4m3", "int8", "k8v4", "int4", "turboquant4", "FA3, fp8_e4m3 queries"]
    assert {len(some) for some in points.values()} == {14}
    (row,) = [
        row
        for row in rows
        if row["case"] == "32/8/128 int8 64q1s4k" and (row["backend"], row["kv_cache_dtype"]) == ("TRITON", "int8")
    ]
    keys = 64 * 4096 * 8 * 264  # sequences, keys, KV heads, bytes of a row of K and one of V
    (point,) = [point for point in points["int8"] if point[1] == row["us"]]
    assert 0.9999 * keys < point[0] < 1.02 * keys, "and queries and outputs; a row has five digits"


def test_losses_are_means_over_positions() -> None:
    curves = plot_formats.loss_curves(content(ACCURACY)["rows"])
    assert [*curves] == ["fp8_e4m3", "fp8_e5m2", "int8", "k8v4"]
    assert [[loss.end for loss in losses] for losses in curves.values()] == [[512, 1024, 2048, 4096]] * 4
    assert all(loss.kl < 0.002 and loss.top1 > 0.97 for loss in curves["int8"])
    shared = {"kv_cache_dtype": "fp8", "positions_below": 512}
    first = {**shared, "positions": 1, "kl": 0.1, "delta_nll": 0.4, "delta_nll_error": 0.3, "top1": 1.0}
    second = {**shared, "positions": 3, "kl": 0.3, "delta_nll": 0.0, "delta_nll_error": 0.1, "top1": 0.5}
    ((only,),) = plot_formats.loss_curves([first, second, {"kv_cache_dtype": "fp8", "fact_at": 0.5}]).values()
    assert only == pytest.approx((512, 0.25, 0.1, 0.3 * 2**0.5 / 4, 0.625))


@pytest.mark.parametrize("name", [*PICTURES])
def test_the_page_has_the_picture_of_the_committed_file(name: str, tmp_path: Path) -> None:
    drawn = tmp_path / name
    contents = [*map(content, PICTURES[name])]
    plot_formats.draw(contents, drawn)
    texts = [path.read_text(encoding="utf-8") for path in (drawn, ROOT / "docs" / name)]
    for meta in (given["meta"] for given in contents):
        assert all(f"commit {meta['commit'].partition(';')[0]}, {meta['date']}" in text for text in texts)
    assert all(f">{form}<" in text for text in texts for form in ("fp8_e4m3", "int8", "k8v4", "int4"))
    assert f"]({name})" in (ROOT / "docs/formats.md").read_text(encoding="utf-8")


def test_rows_of_several_files_are_of_the_same_documents() -> None:
    rows = plot_formats.together([*map(content, LOSSES)])
    assert {row["document"] for row in rows} == {"compound", "specialnames", "types"}
    assert sum(row["kv_cache_dtype"] == "k8v4" for row in rows) == 3 * (4 + 3), "of the first file alone"
    labels = plot_formats._labels(rows)
    assert (labels["int4"], labels["turboquant4"]) == ("int4", "turboquant4 (1 document)")
    assert {"turboquant4:window=64", "turboquant3:window=64"} < {*plot_formats.loss_curves(rows)} and "k8v4" in labels


def test_other_rows_are_refused(tmp_path: Path) -> None:
    meta = {"torch": "2", "commit": "a", "date": "b"}
    with pytest.raises(ValueError, match=r"decodes or accuracy, got suites \['cache'\]"):
        plot_formats.draw([{"meta": meta, "rows": [{"suite": "cache"}]}], tmp_path / "a.svg")
