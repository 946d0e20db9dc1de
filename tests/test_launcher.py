"""The launcher passes on what Triton's dispatch would; calls that a layer repeats are those it would make with care."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from typing import Any, cast

import pytest
import torch
from uninterpreted import output_of

from pagedattn.testing import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="triton is not installed")


@cache
def found() -> dict[str, Any]:
    return json.loads("".join(output_of("launch_kernels.py", CUDA_VISIBLE_DEVICES="", PAGEDATTN_REPLAY="1")))


def test_the_kernel_and_arguments_are_those_that_triton_takes() -> None:
    toys = found()["toys"]
    assert len(toys) == 12
    for name, toy in toys.items():
        assert toy["same"] and toy["values"] and toy["grid"], name


def test_what_triton_specialises_on_is_told_apart() -> None:
    function = {name: toy["function"] for name, toy in found()["toys"].items()}
    for name in ("unaligned", "None", "stride 1", "stride 16", "count int64", "dtype", "True for 1"):
        assert function[name] != function["plain"], name
    # What does not matter to the kernel compiles none: other addresses, multiples of 16, numbers not specialised on.
    assert function["stride 32"] == function["stride 16"] != function["stride 1"]
    assert function["plain"] == function["other tensors"] == function["count 1"] == function["count 16"]


def test_a_launch_is_made_again_with_other_values_only_where_it_may_be() -> None:
    assert found()["replays"] == {
        "repeatable": [True, False],  # the second of an unaligned tensor
        "done": True,
        "values": True,
        "rest": True,
        "refused": False,
        "hooked": True,
        "launches": 2,
    }


def test_a_tensor_descriptor_is_made_again_for_another_tensor() -> None:
    assert found()["described"] == {"same": True, "differ": True}


def test_a_repeated_call_is_what_a_checked_call_does() -> None:
    layers = found()["layers"]
    assert len(layers) >= 28
    for name, layer in layers.items():
        # The decode kernel may overlap what runs before it, and is repeated with another beside it too.
        chained = (
            [False] if "deterministic" in name or "prompts" in name else [True] if "decodes" in name else [True, False]
        )
        once = "once" in name
        chained = [True, True] if once else chained
        assert layer == {"same": True, "careful": [0, 0, 0], "kept": 1, "chained": chained, "once": once}, name
    assert sum("once" in name for name in layers) == 4


def test_a_call_that_a_plan_does_not_serve_is_not_kept() -> None:
    assert found()["unkept"]["foreign"] == 0


def test_a_backend_that_writes_itself_does_so_each_time() -> None:
    unkept = found()["unkept"]
    assert unkept["many"] == {"kept": 64, "first": True}, "a captured graph may write to memory that it holds"
    assert unkept["writes"] == 3 and unkept["kept"] == [True]


def test_few_files_lie_between_a_layer_and_a_launch() -> None:
    """The write and the attention of a step's first layer, and of the others."""
    ways = found()["ways"]
    assert [len(way) for way in ways["first"]] == [6, 7] and [len(way) for way in ways["later"]] == [3, 3], ways
    assert all("layers/attention.py" in way and "runtime/launcher.py" in way for way in ways["first"] + ways["later"])


def test_a_hook_on_compilation_sees_kernels_of_every_format() -> None:
    """Triton writes their constants as JSON for it; vLLM sets one once it serves."""
    assert {"_decode_kernel", "_paged_attention_kernel", "_reshape_and_cache_kernel"} <= set(found()["hooked"])


def test_a_wrong_argument_is_told_after_a_right_call_too() -> None:
    wrong = found()["wrong"]
    assert len(wrong) == 18
    for name, (kept, first) in wrong.items():
        assert kept == first != "nothing", name
        assert kept.startswith("InvalidInputError: "), name


def test_an_argument_varies_with_the_nearest_tensor() -> None:
    """Where blocks have keys and values, these lie between the first key and the last one."""
    launch = import_module("pagedattn.runtime.launcher").Launch
    blocks, other = torch.zeros(4, 2, 64), torch.zeros(8)
    key, value = blocks[:, 0], blocks[:, 1]

    def places(*args: torch.Tensor | float, bases: Any = (None, None), others: Any = (key, value)) -> Any:
        made = launch(0, cast(Any, None), [], [], args, [(0, 0), (1, 1)][: len(args)])
        return made.places(bases, others)

    assert places(key, value) == [(0, 2, 0), (1, 3, 0)] and places(key[:, 16:], 2.0) == [(0, 2, 64), (1, 1, 0)]
    assert places(key, value, bases=(key, value), others=()) == [(0, 0, 0), (1, 1, 0)]
    assert places(value, key, bases=(key, other)) == [(0, 3, 0), (1, 2, 0)], "not of the first base that reaches so far"
    assert places(other) is None and places(blocks.flatten()[1:], bases=(blocks.flatten()[1:], None), others=()) is None


@pytest.mark.parametrize("varying", [[], [(0, 0)]])
def test_a_launch_that_cannot_be_made_again_keeps_no_tensors(varying: list[tuple[int, int]]) -> None:
    """Which may be large, and are to be freed before the next launch."""
    module = import_module("pagedattn.runtime.launcher")
    launcher = object.__new__(module.Launcher)
    launch = module.Launch(0, cast(Any, None), [], [], (torch.zeros(1),), varying)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_launch", lambda *given: launch, raising=False)
        with module.recording() as made:
            launcher((1,), launch.args, {})
    assert made == ([launch] if varying else [None])
