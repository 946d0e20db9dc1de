"""Torch's dispatcher is gone past only where nobody would see the op there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn import ops
from pagedattn.runtime.eager import can_bypass_dispatcher, is_plain_call


class Seen(TorchDispatchMode):
    """Names of the ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def merge(outputs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    return ops.merge_attn_states(outputs, lses)[0]


STATES = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4)


def test_plain_tensors_and_parameters_are() -> None:
    assert can_bypass_dispatcher() and is_plain_call((*STATES, torch.nn.Parameter(torch.ones(2)), None, 1.0, "auto"))


@pytest.mark.parametrize(
    "arg",
    [Subclass(), torch.ones(1, device="meta"), [torch.ones(1)], torch._neg_view(torch.ones(1))],
    ids=["subclass", "meta", "list", "negated view"],
)
def test_what_only_torch_can_judge_is_not(arg: object) -> None:
    assert not is_plain_call((*STATES, arg))


def test_a_profiler_sees_the_op() -> None:
    with torch.profiler.profile() as profile:
        merge(*STATES)
    assert any(event.key == "pagedattn::merge_attn_states" for event in profile.key_averages())


def test_no_mode_is_gone_past() -> None:
    with Seen() as seen:
        merge(*STATES)
    assert "pagedattn::merge_attn_states" in seen.names
    with FakeTensorMode() as mode:
        out = merge(*(mode.from_tensor(x) for x in STATES))
    assert type(out).__name__ == "FakeTensor"


@pytest.mark.parametrize("transform", ["make_fx", "functionalize", "jit.trace"])
def test_no_tracer_is_gone_past(transform: str) -> None:
    seen = []

    def call(*args: torch.Tensor) -> torch.Tensor:
        seen.append(can_bypass_dispatcher())
        return args[0] + args[1].sum()

    if transform == "make_fx":
        make_fx(call)(*STATES)
    elif transform == "functionalize":
        torch.func.functionalize(call)(*STATES)
    else:
        torch.jit.trace(call, STATES, check_trace=False)
    assert seen and not any(seen)


def test_a_traced_op_is_in_the_graph() -> None:
    graph = make_fx(merge)(*STATES)
    assert any("merge_attn_states" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*STATES), merge(*STATES))


@pytest.mark.parametrize("grad", [True, False])
def test_no_graph_is_kept_of_a_write(grad: bool) -> None:
    key, cache = torch.randn(1, 2, 16, requires_grad=True), torch.zeros(2, 4, 2, 16)
    with nullcontext() if grad else torch.no_grad():
        ops.reshape_and_cache(key, None, cache, None, torch.tensor([5]))
    assert cache.grad_fn is None and torch.equal(cache[1, 1], key[0])
