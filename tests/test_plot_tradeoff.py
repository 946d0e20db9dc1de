"""The picture of all cache formats: losses, speeds and bits from result files."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from pagedattn.bench import plot_tradeoff

ACCURACY = {
    "meta": {"gpu": None},
    "rows": [
        {"kv_cache_dtype": "fp8", "positions_below": 512, "positions": 3, "kl": 0.1},
        {"kv_cache_dtype": "fp8", "positions_below": 1024, "positions": 1, "kl": 0.5},
        {"kv_cache_dtype": "int4", "positions_below": 512, "positions": 2, "kl": 0.3},
        {"kv_cache_dtype": "int4", "fact_at": 0.5, "delta_nll": 9.0},
    ],
}
SHAPE = plot_tradeoff.WORKLOAD
DECODES = {
    "meta": {"gpu": "a GPU"},
    "rows": [
        {**SHAPE, "kv_cache_dtype": "fp8_e4m3", "backend": "TRITON", "us": 50.0},
        {**SHAPE, "kv_cache_dtype": "fp8_e4m3", "backend": "TRITON auto", "us": 90.0},
        {**SHAPE, "head_dim": 64, "kv_cache_dtype": "int4", "backend": "TRITON", "us": 1.0},
        {**SHAPE, "backend": "TRITON", "us": 91.0},
        {**SHAPE, "kv_cache_dtype": "int8", "backend": "TRITON", "us": None},
    ],
}


def test_losses_are_means_of_positions_and_speeds_of_one_run() -> None:
    assert plot_tradeoff.losses([DECODES, ACCURACY]) == pytest.approx({"fp8_e4m3": 0.2, "int4": 0.3})
    assert plot_tradeoff.speeds([ACCURACY, DECODES]) == {"fp8_e4m3": 1.8}


def test_bits_count_scales() -> None:
    assert plot_tradeoff.bits("fp8_e4m3") == 8 and plot_tradeoff.bits("int8") == 8.25
    assert plot_tradeoff.bits("int4") == 4.625 and plot_tradeoff.bits("turboquant4:window=64") == 4.125


def test_a_format_is_a_point_with_its_speed() -> None:
    axes = plot_tradeoff.figure_of({"fp8_e4m3": 0.2, "int4": 0.3}, {"fp8_e4m3": 1.8}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["fp8_e4m3 (1.8x)", "int4"]
    assert [line.get_ydata()[0] for line in axes.lines] == [0.2, 0.3]
    assert axes.lines[1].get_markerfacecolor() == "none" != axes.lines[0].get_markerfacecolor()
