"""Latent attention's way to the kernels for Hopper, through Triton's own JIT, with a driver that only takes notes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")


@cache
def found() -> dict[str, dict[str, Any]]:
    return json.loads(output_of("launch_mla.py", CUDA_VISIBLE_DEVICES="")[-1])


def loads(size: int, width: int, *boxes: tuple[int, int, int]) -> list[str]:
    """Descriptors of a cache of 20 blocks, by (swizzle, slots, bytes) of a box."""
    return [
        f"({swizzle}, 1, 0, [{slots}, 1, {wide}], [{size}, 20, {width}], [{width}, {size * width}, 1], 0)"
        for swizzle, slots, wide in boxes
    ]


@pytest.mark.parametrize(
    ("name", "descriptors"),
    [
        ("e4m3", loads(64, 576, (3, 64, 128), (2, 64, 64))),
        ("e4m3, scale in memory", loads(16, 576, (3, 16, 128), (2, 16, 64))),
        ("ds_mla", loads(128, 656, (3, 64, 128), (3, 64, 128), (0, 64, 16))),
    ],
)
def test_rows_of_codes_are_loaded_as_bytes(name: str, descriptors: list[str]) -> None:
    assert found()[name]["descriptors"] == descriptors


@pytest.mark.parametrize(
    ("name", "launches"), [("bf16", 2), ("e4m3", 1), ("e4m3, scale in memory", 2), ("ds_mla", 1), ("e4m3, one head", 1)]
)
def test_a_call_is_two_launches_or_one_and_the_next_one_the_same(name: str, launches: int) -> None:
    """One where two programs or fewer share an item over codes: they add up its states themselves."""
    assert found()[name]["grids"][0] == [132, 1, 1] and len(found()[name]["grids"]) == launches
    assert found()[name]["again"]
