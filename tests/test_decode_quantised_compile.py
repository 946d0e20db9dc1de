"""The decode kernel for 8-bit caches compiles for Hopper without one, and its loop is what was measured."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import random_work
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
# Products of 16 keys, D of them and Dv, by 8 rows; loads of codes of 64 bits or more; instructions at most.
LOOPS = {
    "e4m3-D128-G4": (16, 8, 330),
    "int8-D128-G4": (16, 8, 440),
    "k8v4-D128-G4": (16, 8, 430),
    "e5m2-D64-G4-T2-window-all": (8, 6, 330),
    "e4m3-D128-G4-few": (16, 8, 330),
    "int8-D256-G8": (32, 16, 700),
    "k8v4-D256-G8": (32, 12, 690),
    "k8v4-D64-G4-few": (8, 2, 410),
    "e4m3-D128-G16-few": (32, 8, 450),
}
REGISTERS = {"int8-D256-G8": 255, "k8v4-D256-G8": 255, "e4m3-D128-G16-few": 255}
REGISTERS |= dict.fromkeys(("e4m3-D128-G4", "int8-D128-G4", "k8v4-D128-G4"), 168)  # three programs of four warps an SM


@cache
def compiled() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of("compile_decode_quantised.py", *random_work.option())]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.grid] * (i > 3)) for i, one in enumerate(LOOPS)])
def test_it_compiles_as_it_was_measured(name: str) -> None:
    found, (products, loads, instructions) = compiled()[name], LOOPS[name]
    loop = found["loop"]
    assert loop["HMMA"] == products and found["wide_loads"] == loads and found["instructions"] <= instructions
    assert not {"STS", "LDS", "LDSM", "BAR"} & {*loop}, "codes go through shared memory, or warps wait for each other"
    assert found["registers"] and max(found["registers"]) <= REGISTERS.get(name, 128)
    assert max(found["spills"]) <= 64, "what is spilled are addresses; a tile would be hundreds of bytes"
