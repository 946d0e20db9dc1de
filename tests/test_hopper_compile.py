"""The Gluon prefill kernel compiles for Hopper without one: warps specialised, products asynchronous, all in room."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
import random_work
from uninterpreted import output_of

from pagedattn.runtime.triton_versions import series

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
# Bytes, by the assembler of Triton 3.6 to 3.8 (ptxas 12.8 and 12.9) and of 3.9 (13.4, told to allocate registers in
# another way, see bench/NOTES.md): of D 256, and where states are added up.
SPILLS = {
    "bf16-D128-G4-S16": (8, 1016),
    "fp16-D64-G1-S64-softcap": (16, 132),
    "bf16-D128-G5-S32-window": (16, 1124),
    "bf16-D256-G8-S256-window-sinks": (400, 2300),
    "bf16-D128-G4-S16-parts": (140, 1244),
    "bf16-D256-G8-S16-parts-sinks": (160, 3816),
    "copy-int8-D128-G4-S16": (48, 1244),
    "copy-int4-D128-G4-S32-unrounded": (16, 1500),
    "e4m3-D128-G4-S16": (170, 800),
    "bf16-D128-G5-S16-parts": (200, 900),
    "bf16-D96-G4-S16-parts": (140, 900),
    "bf16-D128-G4-packed": (8, 1016),
    "bf16-D192-128-G1-S16": (130, 1300),
    "fp16-D72-G8-S64-window-sinks": (32, 600),
    "bf16-D240-G4-S16-softcap": (110, 1500),
    "e5m2-D64-G4-S16-parts": (16, 320),
    "e4m3-D256-G8-S256-window-sinks": (520, 1320),
    # Keys are converted too: tiles in order, one loop a consumer.
    "int8-D128-G4-S16": (32, 200),
    "int8-D128-G4-S16-scales-by-slot": (40, 200),
    "k8v4-D128-G4-S16-parts": (56, 200),
    "int4-D128-G4-S32-parts": (56, 200),
    "int8-D64-G8-S256-window-sinks": (40, 200),
    "int8-D64-G4-S16-parts-fp16": (40, 200),
    "int8-D256-G4-S32-parts": (120, 800),
    "e4m3-D128-G4-S16-parts-fp16": (32, 200),
}


@cache
def compiled() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of("compile_hopper.py", *random_work.option())]
    return {line["name"]: line for line in lines}


# By default keys in 16 bit, split, in which all of the plain kernel is, whole and in parts of a head dim, codes that
# are converted, and a copy; under --grid fp8, packed keys, other head dims, masks, soft caps and sinks.
MORE = {"bf16-D128-G4-S16", "bf16-D128-G5-S32-window", "bf16-D256-G8-S256-window-sinks", "bf16-D256-G8-S16-parts-sinks"}
MORE |= {"fp16-D64-G1-S64-softcap", "bf16-D128-G4-packed", "e4m3-D128-G4-S16", "copy-int8-D128-G4-S16"}
MORE |= {"e5m2-D64-G4-S16-parts", "e4m3-D256-G8-S256-window-sinks"}
MORE |= {"int8-D64-G8-S256-window-sinks", "int8-D64-G4-S16-parts-fp16", "int8-D256-G4-S32-parts"}
MORE |= {"e4m3-D128-G4-S16-parts-fp16"}
MORE |= {"bf16-D192-128-G1-S16", "fp16-D72-G8-S64-window-sinks", "bf16-D240-G4-S16-softcap"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.grid] * (one in MORE)) for one in SPILLS])
def test_it_compiles_as_it_was_measured(name: str) -> None:
    found = compiled()[name]
    assert found["shared"] <= 232448
    assert found["warp_groups"] >= 3, "two consumers and the loaders give registers away or take them"
    assert found["wgmma"] and found["tma"]
    assert not found["serialized"], "ptxas waits for each product, which costs half of the speed"
    assert not found["unwritten"], "ptxas sets up an address on a path that may be skipped (uniform_registers.py)"
    loops = 2 if found["in_order"] else 4  # of both consumers, where tiles seen in part have one of their own
    beside = found["beside"]
    assert len(beside) >= loops and min(beside) > 0.9, "a softmax waits for products it should run beside"
    of_tokens = name.startswith(("int8", "k8v4", "int4"))
    each = 4 if "by-slot" in name else 8 if "D256" in name else 16
    assert found["scale_bytes"] == ([each] if of_tokens else []), "of four keys of a tile of 128 in one copy"
    # What is spilled are addresses; a tile would be thousands of bytes.
    assert found["spills"] and max(found["spills"]) <= SPILLS[name][series(version("triton")) >= (3, 9)]
