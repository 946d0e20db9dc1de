"""The decode kernel for codes compiles for Hopper without one, and its loop is what was measured."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import random_work
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
# Products of 16 keys, or of 32 of 4 bits, D of them and Dv, by 8 rows; loads of codes, and of what channels have, of 64
# bits or more; instructions at most.
LOOPS = {
    "e4m3-D128-G4": (16, 8, 300),
    "int8-D128-G4": (16, 8, 390),
    "k8v4-D128-G4": (16, 8, 390),
    "int4-D128-G4": (64, 20, 770),
    "turboquant4-D128-G4": (48, 12, 910),
    "e5m2-D64-G4-T2-window-all": (8, 6, 310),
    "e4m3-D128-G4-few": (16, 8, 300),
    "int8-D256-G8": (32, 16, 610),
    "k8v4-D256-G8": (32, 12, 600),
    "k8v4-D64-G4-few": (8, 2, 360),
    "int4-D256-G8": (80, 24, 910),
    "int4-D64-G4-T2-few": (20, 6, 410),
    "turboquant4-D64-G8-S16-few": (12, 2, 450),
    "turboquant4-D256-G4": (48, 8, 1000),
    "e4m3-D128-G16-few": (32, 8, 420),
}
# Products of 64 keys, D and Dv by 64 rows, of which a wgmma takes 16 elements; instructions at most, with those of
# tiles that some rows do not see.
MANY_ROWS = {
    "k8v4-D128-G4-T16": (12, 860),
    "int8-D128-G4-T8": (12, 820),
    "e4m3-D128-G8-T5-all": (12, 1150),
    "int4-D128-G4-T16": (12, 880),
    "turboquant4-D128-G8-T4": (20, 1000),
}
REGISTERS = {"int8-D256-G8": 255, "k8v4-D256-G8": 255, "e4m3-D128-G16-few": 255, "int4-D64-G4-T2-few": 255}
REGISTERS |= {"int4-D256-G8": 255, "turboquant4-D256-G4": 255}
THREE_PROGRAMS = (
    "e4m3-D128-G4",
    "int8-D128-G4",
    "k8v4-D128-G4",
    "int4-D128-G4",
    "turboquant4-D128-G4",
)
REGISTERS |= dict.fromkeys(THREE_PROGRAMS, 168)
# By default codes of 8 bit, with all features, and of 4 bit, by channel and turned.
FEW = {"int4-D128-G4", "e5m2-D64-G4-T2-window-all", "k8v4-D128-G4-T16"}


@cache
def compiled() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of("compile_decode_quantised.py", *random_work.option())]
    return {line["name"]: line for line in lines}


def _names(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(one, marks=[pytest.mark.grid] * (one not in FEW)) for one in table]


@pytest.mark.parametrize("name", _names(LOOPS))
def test_it_compiles_as_it_was_measured(name: str) -> None:
    found, (products, loads, instructions) = compiled()[name], LOOPS[name]
    loop = found["loop"]
    assert loop["HMMA"] == products and found["wide_loads"] == loads and found["instructions"] <= instructions
    assert not {"STS", "LDS", "LDSM", "BAR"} & {*loop}, "codes go through shared memory, or warps wait for each other"
    assert found["registers"] and max(found["registers"]) <= REGISTERS.get(name, 128)
    assert not {"LDL", "STL"} & {*loop} and max(found["spills"]) <= 96, "what is spilled are addresses, before the loop"


@pytest.mark.parametrize("name", _names(MANY_ROWS))
def test_more_rows_compile_as_they_were_measured(name: str) -> None:
    found, (products, instructions) = compiled()[name], MANY_ROWS[name]
    assert found["loop"]["HGMMA"] == products and found["instructions"] <= instructions
    assert not {"LDL", "STL"} & {*found["loop"]} and max(found["spills"]) <= 256
    assert 2 * (found["shared"] + 1024) <= 233472, "two programs an SM"
