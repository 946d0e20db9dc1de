"""The Gluon kernels for latent attention compile for Hopper without one: all in room, products not waited for alone."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import random_work
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
# Products of logits and of both halves of outputs, by rows of a query block, or over codes of logits, of outputs and of
# those of a tile that is masked, of two warpgroups; bytes spilled, at most, and accesses to them in loops over keys,
# most of them where states are raised or a tile is masked.
OVER_CODES = 2 * (36 + 2 * 32)
EXPECTED = {
    "bf16-H128-64x1-page64-(1, 0)": (36 + 2 * 4, 80, 4),
    "bf16-ds_mla-H128-64x1-page64-(1, 0)": (OVER_CODES, 1050, 170),
    "bf16-e4m3-H128-1x1-page64-(1, 0)": (OVER_CODES, 300, 45),
}
# Products of codes of fp8, of two warpgroups: where more than 16 rows of bfloat16 are multiplied with them.
OF_CODES = {f"bf16-ds_mla-H128-{seqs}x1-page64-(1, 0)": 2 * 32 for seqs in (1, 64)}
OF_CODES |= {f"bf16-e4m3-H128-{seqs}x1-page64-(1, 0)": 2 * 36 for seqs in (1, 64)}
MORE = {
    "fp16-H16-8x2-page16-(1, 100)-cap-unaligned": (36 + 2 * 16, 120, 4),
    "bf16-e4m3-H16-64x1-page64-(1, 0)": (OVER_CODES, 120, 0),
    "bf16-H16-300x1-page8-(1, 0)": (36 + 2 * 16, 200, 4),
    "bf16-H64-64x4-page128-(1, 0)": (36 + 2 * 4, 80, 12),
    "bf16-H96-64x1-page64-(0, 0)": (36 + 2 * 4, 80, 12),
    "bf16-e4m3-H128-64x1-page64-(1, 0)": (OVER_CODES, 520, 45),
    "bf16-ds_mla-H128-1x1-page64-(1, 0)": (OVER_CODES, 830, 170),
    "fp16-e4m3-H8-300x2-page8-(1, 100)-cap": (OVER_CODES, 180, 4),
    "bf16-ds_mla-H16-64x1-page128-(1, 0)": (OVER_CODES, 200, 4),
    "fp16-ds_mla-H16-8x2-page16-(0, 100)-cap": (OVER_CODES, 560, 60),
}
EXPECTED |= MORE if random_work.everything else {}


@cache
def compiled() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of("compile_mla.py", *random_work.option())]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_compiles_as_it_was_measured(name: str) -> None:
    found, (products, spilled, accesses) = compiled()[name], EXPECTED[name]
    assert found["shared"] <= 232448
    assert found["wgmma"] == products and found["tma"]
    assert not found["serialized"], "ptxas waits for each product"
    assert not found["overwritten"], "operands of the second tile"
    assert found["loops"] >= 2, "one for each warpgroup at least"
    assert found["of_codes"] == OF_CODES.get(name, 0)
    assert found["spills"] and max(found["spills"]) <= spilled and found["spilled_in_loop"] <= accesses


def test_all_that_should_be_compiled_is() -> None:
    assert set(compiled()) == set(EXPECTED)
