"""The decode kernel for Hopper compiles without one, and its loop is what was measured."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import random_work
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
# Products of 16 keys, or of 32 of 4 bits, D of them and Dv, by 8 rows; copies of codes, and of what channels have, of
# 16 bytes; instructions at most.
LOOPS = {
    "bf16-D128-G2": (16, 16, 420),
    "fp16-D64-G8-window-all": (8, 8, 330),
    "e4m3-D128-G4": (16, 8, 380),
    "int8-D128-G4": (16, 8, 420),
    "k8v4-D128-G4": (16, 6, 400),
    "int4-D128-G4": (64, 9, 820),
    "turboquant4-D128-G4": (48, 8, 935),
    "e5m2-D64-G4-T2-window-all": (8, 4, 300),
    "e4m3-D128-G4-few": (16, 8, 350),
    "int8-D256-G8": (32, 16, 675),
    "k8v4-D256-G8": (32, 12, 650),
    "k8v4-D64-G4-few": (8, 4, 340),
    "int4-D256-G8": (80, 10, 1000),
    "int4-D64-G4-T2-few": (32, 5, 700),
    "turboquant4-D64-G8-S16-few": (12, 3, 410),
    "turboquant4-D256-G4": (48, 8, 945),
    "turboquant3-D128-G4": (48, 8, 950),
    "turboquant3-D64-G4": (24, 8, 670),
    "turboquant2-D128-G4": (48, 4, 700),
    "turboquant_k4v3-D128-G8-few": (48, 8, 1015),
    "turboquant_k3v4-D256-G8": (48, 8, 905),
    "e4m3-D128-G16-few": (32, 8, 440),
    "e4m3-D96-G4": (16, 8, 355),
    "k8v4-D72-G4": (16, 0, 460),
    "k8v4-D192-G8": (32, 12, 665),
    "int4-D96-G4": (64, 9, 830),
    "turboquant3-D96-G4": (48, 0, 1000),
    "int4-D128-G4-T4": (64, 9, 985),
}
# Products of 64 keys by 32 rows, of which a wgmma takes 16 elements, or 16 keys of 64 channels; instructions at
# most, with the fifth that rescales states.
FEW_ROWS = {
    "k8v4-D128-G4-T8": (16, 905),
    "int8-D128-G4-T8": (16, 910),
    "int8-D80-G4-T5": (16, 910),
    "e4m3-D128-G8-T4-all": (16, 850),
    "int4-D96-G4-T8": (16, 1060),
    "turboquant4-D128-G8-T4": (24, 1085),
    "turboquant3-D128-G8-T4": (24, 1210),
    "turboquant2-D80-G4-T8": (24, 985),
}
# Products of 64 keys, D and Dv by 64 rows, of which a wgmma takes 16 elements; instructions at most, with those of
# tiles that some rows do not see.
MANY_ROWS = {
    "k8v4-D128-G4-T16": (12, 860),
    "e4m3-D128-G8-T5-all": (12, 1150),
    "int4-D128-G4-T16": (12, 880),
    "turboquant4-D80-G4-T16": (20, 960),
    "int4-D112-G4-T16": (12, 890),
    "k8v4-D64-G4-T16": (8, 710),
    "turboquant3-D64-G8-T5": (12, 1250),
}
LARGE_STATES = {name for name in LOOPS if any(one in name for one in ("D256", "D192", "G16", "T4"))}
OF_UPPER_BITS = {
    "turboquant3-D128-G4",
    "turboquant3-D96-G4",
    "turboquant3-D64-G4",
    "turboquant_k3v4-D256-G8",
}  # those of four rows at a time
# By default elements of 16 bit, codes of 8 bit, with all features, and of 4 bit, by channel and turned.
FEW = {"int4-D128-G4", "e5m2-D64-G4-T2-window-all", "k8v4-D128-G4-T8", "k8v4-D128-G4-T16", "bf16-D128-G2"}


@cache
def compiled() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of("compile_decode_sm90.py", *random_work.option())]
    return {line["name"]: line for line in lines}


def _names(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(one, marks=[pytest.mark.grid] * (one not in FEW)) for one in table]


@pytest.mark.parametrize("name", _names(LOOPS))
def test_it_compiles_as_it_was_measured(name: str) -> None:
    found, (products, loads, instructions) = compiled()[name], LOOPS[name]
    loop = found["loop"]
    assert loop["HMMA"] == products and found["wide_loads"] == loads and found["instructions"] <= instructions
    assert loop["LDG"] == 1 and loop["LDGDEPBAR"] == 1, "but for block ids, what comes from memory is not waited for"
    assert loop["BAR"] <= 2 and "STS" not in loop, "codes are read as they were copied"
    assert loop.get("LDSM", 0) == (name in OF_UPPER_BITS)
    assert found["registers"] and max(found["registers"]) <= (255 if name in LARGE_STATES else 168)
    assert "STL" not in loop and loop.get("LDL", 0) <= 4 and max(found["spills"]) <= 96, "what is spilled are addresses"


@pytest.mark.parametrize("name", _names(FEW_ROWS | MANY_ROWS))
def test_more_rows_compile_as_they_were_measured(name: str) -> None:
    found, (products, instructions) = compiled()[name], (FEW_ROWS | MANY_ROWS)[name]
    assert found["loop"]["HGMMA"] == products and found["instructions"] <= instructions
    assert not {"LDL", "STL"} & {*found["loop"]} and max(found["spills"]) <= 256
    assert not found["overwritten"], "operands of the second tile"
    assert 2 * (found["shared"] + 1024) <= 233472, "two programs an SM"
