"""A prefix that all sequences share, attended to once on a Hopper GPU: by the kernel that serves so many rows."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from backends.test_decode_sm90 import KINDS as OF_CODES
from backends.test_hopper import HERE
from backends.triton_kinds import KINDS, case_of_kind

from pagedattn.backends.registry import get_backend
from pagedattn.kernels.decode import cascade
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.ops import attention_plan
from pagedattn.ops.launch_plan import LaunchPlan
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

attention_op = import_module("pagedattn.ops.paged_attention")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)
# Tokens and keys of sequences that share 256 keys.
STEPS = {
    "decodes": ((1,) * 30, tuple(257 + 9 * i for i in range(30))),
    "several tokens": ((4, 1, 3), (260, 257, 900)),
    "one": ((1,), (300,)),
    "with a prompt": ((1,) * 20 + (40,), (300,) * 20 + (400,)),
}
NATIVE = [name for name, kind in KINDS.items() if not kind.get("sliding_window") and kind.get("block_size") != 256]
CODES = ("e4m3, scales of heads, HND", "int8", "int8, fp16, window, sinks", "k8v4", "turboquant4")


@pytest.fixture(params=["prompts' kernel", "decodes' kernel"])
def by_prompts(request: pytest.FixtureRequest) -> bool:
    """Whether the kernel for prompts is to serve the prefix where it can."""
    return request.param == "prompts' kernel"


@pytest.fixture
def executed(by_prompts: bool, monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans that calls were made by, a prefix's after that of the whole call."""
    monkeypatch.setattr(cascade, "SAVED_BYTES", -(1 << 62))
    monkeypatch.setattr(attention_plan, "has_prompts_work", lambda shape, *_: by_prompts and "int8" not in shape.codes)
    plans, execute = list[LaunchPlan](), attention_op.execute

    def seen(plan: LaunchPlan, inputs: AttentionInputs) -> None:
        plans.append(plan)
        execute(plan, inputs)
        if plan.workspace is not None:
            assert not plan.workspace[: 3 * COUNTERS].any(), "a counter was not left as it was found"

    monkeypatch.setattr(attention_op, "execute", seen)
    return plans


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", [*NATIVE, *CODES])
def test_a_shared_prefix(kind: str, step: str, by_prompts: bool, executed: list[LaunchPlan]) -> None:
    queries, keys = STEPS[step]
    case = OF_CODES[kind].but(sliding_window=None) if kind in CODES else case_of_kind(kind)
    case = case.but(query_lens=queries, seq_lens=keys, shared_prefix=256)
    check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
    found = {plan.prefix.launches[0].span.kernel for plan in executed if plan.prefix is not None}
    assert found and len(executed) % 2 == 0, "the prefix was not attended to by a call of its own"
    of_codes = "decode_sm90" if kind in CODES else "decode"
    assert found == {"prefill_sm90" if by_prompts and (kind not in CODES or "e4m3" in kind) else of_codes}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["int4", "int4, fp16, 96", "turboquant4, the last 64 tokens in 16 bit"])
def test_a_prefix_of_a_cache_with_open_blocks(kind: str, step: str, executed: list[LaunchPlan]) -> None:
    queries, keys = STEPS[step]
    case = OF_CODES[kind].but(query_lens=queries, seq_lens=keys, shared_prefix=256)
    check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
    assert {plan.prefix.launches[0].span.kernel for plan in executed if plan.prefix is not None} == {"decode_sm90"}


@pytest.mark.parametrize("kind", ["plain", "int8", "k8v4"])
def test_without_lse(kind: str, executed: list[LaunchPlan]) -> None:
    case = OF_CODES[kind] if kind in CODES else case_of_kind(kind)
    queries, keys = STEPS["decodes"]
    case = case.but(query_lens=queries, seq_lens=keys, shared_prefix=256, lse=False)
    check(get_backend("TRITON"), make_problem(case, DEVICE), case.id)
    assert executed
