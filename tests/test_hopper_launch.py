"""A layer's way to Hopper's prefill kernel, through Triton's own JIT, with a driver that only takes notes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from uninterpreted import output_of

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")


FIRST, LATER = 8, 4  # files at most from a layer to a launch: of a step's first layer, and of the others


@cache
def found() -> dict[str, dict[str, Any]]:
    return json.loads(output_of("launch_hopper.py", CUDA_VISIBLE_DEVICES="")[-1])


def calls() -> dict[str, dict[str, Any]]:
    return found()["calls"]


@pytest.mark.parametrize("name", ["prompts", "blocks of unknown size", "HND", "one head", "fp8", "int8"])
def test_a_step_lists_its_items_once_and_a_layer_launches_once(name: str) -> None:
    made = calls()[name]
    assert made["launches"] == [1, 1, 1, 1] and "(for Hopper)" in made["describe"]
    assert len(made["descriptors"]) >= 3, "queries, keys and values come by TMA"


def test_decodes_are_items_among_those_of_prompts() -> None:
    made = calls()["prompts and decodes"]
    assert made["launches"] == [1, 1, 1, 1] and made["describe"] == "prefill kernel: 3 sequences (for Hopper)"


def test_long_decodes_have_a_launch_of_their_own() -> None:
    made = calls()["prompts and long decodes"]
    assert made["launches"] == [1, 2, 1, 1]
    assert "decode kernel: 2 sequences" in made["describe"] and "1 sequences (for Hopper)" in made["describe"]


def test_few_tiles_of_prompts_and_decodes_are_split_together() -> None:
    made = calls()["few prompts and long decodes"]
    assert made["launches"] == [1, 2, 1, 1] and made["describe"] == "prefill kernel: 3 sequences (for Hopper, split-KV)"


@pytest.mark.parametrize("name", ["a prompt on a long context", "several tokens each"])
def test_few_query_blocks_share_their_keys_out(name: str) -> None:
    """By one launch, and another that adds up their states."""
    made = calls()[name]
    assert made["launches"] == [1, 2, 1, 1] and made["describe"].endswith("(for Hopper, split-KV)")


@pytest.mark.parametrize(
    "name",
    [
        *("prompts", "prompts and decodes", "prompts and long decodes", "several tokens each"),
        *("HND", "one head", "fp8", "int8", "int8, D 256", "D 80", "int4, chunk"),
    ],
)
def test_other_layers_repeat_the_launches_that_triton_makes(name: str) -> None:
    assert calls()[name]["again"] == {"kept": True, "freed": True, "careful": True, "triton": True}


@pytest.mark.parametrize("name", ["int8", "int4, chunk"])
def test_codes_are_read_as_heads_that_queries_have(name: str) -> None:
    """Whose rows are of fewer bytes."""
    made = calls()[name]
    assert made["widths"] == [128] and "dequantised" not in made["describe"]


def test_programs_are_as_many_as_items_or_sms() -> None:
    assert calls()["prompts"]["grid"] == (340 // 32 + 2) * 2  # heads in packs of 4: 32 tokens an item
    assert calls()["one head"]["grid"] == 300 // 128 + 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("D 60", "head dims 60 and 60"),
        ("int8, D 60", "head dims 60 and 60, not 64, 128, 256"),
    ],
)
def test_what_it_does_not_serve_goes_to_the_portable_kernel(name: str, reason: str) -> None:
    made = calls()[name]
    assert made["launches"] == [0, 1, 0, 0] and "the portable one" in made["describe"] and reason in made["describe"]


def test_codes_that_tma_cannot_load_are_dequantised_before() -> None:
    """Few rows too, where the copy is small."""
    made = calls()["int8, D 256, blocks of 16"]
    assert made["launches"][1] == 3 and "split-KV, keys and values dequantised before" in made["describe"]
    assert made["again"] == {"kept": True, "freed": True, "careful": True, "triton": True}


def test_one_copy_is_there_at_a_time() -> None:
    made = calls()["k8v4, in passes"]
    assert made["launches"][1] > 6 and "passes over their keys" in made["describe"]
    assert made["again"]["freed"] and not made["again"]["kept"]
    assert all(made["again"]["freed"] for made in calls().values())


@pytest.mark.parametrize(("name", "launches"), [("int4", 3), ("int4, decodes", 2), ("int4, prefix", 3)])
def test_calls_over_two_caches_are_repeated(name: str, launches: int) -> None:
    made = calls()[name]
    assert made["launches"][1] == launches and "open blocks: " in made["describe"]
    assert ("shared prefix of 2976 keys attended once" in made["describe"]) == (name == "int4, prefix")
    assert made["again"] == {"kept": True, "freed": True, "careful": True, "triton": True}


def test_heads_are_dequantised_in_turns() -> None:
    made = calls()["k8v4, in turns"]
    assert made["launches"][1] == 6 and "split-KV, keys and values dequantised before, in 2 turns" in made["describe"]
    assert made["again"] == {"kept": True, "freed": True, "careful": True, "triton": True}


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        *(("fp8, long", 2), ("int8, D 256, long", 2), ("k8v4", 2), ("k8v4 and decodes", 3), ("turboquant4, long", 2)),
        *(("int8, D 80", 2), ("turboquant4, D 80", 2), ("int8, blocks of 24", 2), ("fp8, blocks of 4", 2)),
    ],
)
def test_long_prompts_over_quantised_caches_are_dequantised_before(name: str, launches: int) -> None:
    made = calls()[name]
    assert made["launches"][1] == launches and made["describe"].endswith("keys and values dequantised before)")
    assert made["again"] == {"kept": True, "freed": True, "careful": True, "triton": True}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("prompts", ["prefill_sm90/kernel.py"]),
        ("prompts, fp8 codes", ["prefill_sm90/codes_kernel.py", "prefill_sm90/reduce_splits.py"]),
        ("prompts, int8 codes", ["prefill_sm90/codes_kernel.py", "prefill_sm90/reduce_splits.py"]),
        ("prompts, dequantised", ["dequantise/kernel.py", "prefill_sm90/copy_kernel.py"]),
        ("prompts, turboquant4", ["dequantise/kernel.py", "prefill_sm90/copy_kernel.py"]),
        ("decodes, fp8", ["decode_sm90/kernel.py"]),
        ("decodes, int8", ["decode_sm90/kernel.py"]),
        ("decodes, k8v4", ["decode_sm90/kernel.py"]),
    ],
)
def test_few_files_lie_between_a_layer_and_a_launch(name: str, kernels: list[str]) -> None:
    """Of the write and of each kernel."""
    way = found()["ways"][name]
    for files, kernel in zip(way["first"], ["cache_write/kernel.py", *kernels], strict=True):
        assert len(files) <= FIRST and f"kernels/{kernel}" in files, files
        assert {"layers/attention.py", "runtime/launcher.py"} <= set(files)
    assert len(way["later"]) == len(way["first"])
    assert all(len(files) <= LATER and "runtime/launcher.py" in files for files in way["later"]), way["later"]
