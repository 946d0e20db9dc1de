"""What TRITON builds for a step: which kernels it names, and whose workspace its calls use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from pagedattn import AttentionCall, AttentionSpec, CommonAttentionMetadata, ops
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.triton import TritonBackend
from pagedattn.backends.triton import metadata as triton_metadata
from pagedattn.backends.triton.metadata import TritonMetadataBuilder
from pagedattn.kernels import hopper
from pagedattn.kernels.decode import cascade
from pagedattn.kernels.decode.plan import DecodeConfig
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.ops import attention_plan
from pagedattn.ops.attention_plan import plan_call
from pagedattn.ops.launch_plan import LaunchPlan, Span
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing.case import Case
from pagedattn.testing.problem import make_problem

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of what a kernel fills
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16, block_size=16)


def step(*query_lens: int, keys: int = 400, device: torch.device = CPU) -> CommonAttentionMetadata:
    table = torch.zeros(len(query_lens), 512, dtype=torch.int32, device=device)
    return CommonAttentionMetadata.from_lengths(query_lens, [keys] * len(query_lens), table)


def plan_of(metadata: AttentionMetadata) -> LaunchPlan:
    assert metadata.plan is not None
    return metadata.plan


def workspace(metadata: AttentionMetadata) -> torch.Tensor | None:
    return plan_of(metadata).workspace


@pytest.mark.parametrize(
    ("lens", "text"),
    [
        ((1, 1), "decode kernel: 2 sequences (16 programs, tiles of 128 keys)"),
        ((1, 5, 16), "decode kernel: 3 sequences (42 programs, tiles of 64 keys)"),
        (
            (1, 1, 40),
            "decode kernel: 2 sequences (16 programs, tiles of 128 keys), "
            "prefill kernel: 1 sequences (the portable one: no Hopper GPU)",
        ),
        ((40, 1), "prefill kernel: 2 sequences (the portable one: no Hopper GPU)"),
        ((0, 0), "nothing to do"),
    ],
)
def test_it_says_which_kernels_run(lens: tuple[int, ...], text: str) -> None:
    assert TritonMetadataBuilder(SPEC, CPU).build(step(*lens)).describe() == text


def test_a_step_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again by the layers' calls, nor by what says what will run."""
    planned, real = [], attention_plan.plan_spans

    def plan_spans(*args: Any, **options: Any) -> list[Span]:
        planned.append(args)
        return real(*args, **options)

    monkeypatch.setattr(attention_plan, "plan_spans", plan_spans)
    problem = make_problem(Case(query_lens=(1, 1, 40), seq_lens=(50, 33, 80), head_dim=16), DEVICE)
    builder, impl = TritonMetadataBuilder(problem.spec, DEVICE), TritonBackend.impl(problem.spec)
    metadata = builder.build(problem.common)
    assert metadata.describe().count("kernel") == 2 and len(planned) == 1
    for _ in range(2):
        impl.forward(AttentionCall(problem.query, problem.cache), metadata)
    assert len(planned) == 1
    assert problem.cache is not None
    ops.paged_attention(
        *(problem.query, problem.cache.key, problem.cache.value, problem.common.block_table),
        *(problem.common.query_start_loc, problem.common.seq_lens),
        **{"max_query_len": 40, "max_seq_len": 80, "scale": 1.0, "path": "triton"},
    )
    assert len(planned) == 2, "an op that is given no plan makes one, by the same function"


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("shared", [0, 384])
@pytest.mark.parametrize("lens", [(1, 1, 40), (1,) * 80, (8,) * 80, (8,) * 20, (40, 33), (0, 1, 16)], ids=len)
def test_what_a_plan_needs_is_there(
    lens: tuple[int, ...], shared: int, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured metadata know less than their step: not how many decode, unless all do."""
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    monkeypatch.setattr(cascade, "SAVED_BYTES", 0)
    for keys in (400, 3000):
        common = step(*lens, keys=keys, device=DEVICE).replace(shared_prefix_len=shared)
        plan = plan_of(TritonMetadataBuilder(SPEC, DEVICE).build(common, capture=capture))
        spans = [launch.span for launch in plan.launches]
        served = sorted(index for span in spans for index in range(span.first, span.last))
        assert served == [*range(len(lens))]
        prefilled = sum(span.last - span.first for span in spans if span.kernel == "prefill_sm90")
        assert (plan.tile_schedule is not None) == (prefilled > 0)
        assert not prefilled or {sequence for *_, sequence in listed(plan)} <= {*range(prefilled)}
        assert (plan.cascade is not None) == (plan.prefix is not None)
        assert plan.workspace_size <= (0 if plan.workspace is None else plan.workspace.numel())


FEATURES: tuple[dict[str, Any], ...] = (
    {"sliding_window": 20},
    {"causal": False},
    {"softcap": 5.0, "sinks": 0.5},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "float"},
    {"query_lens": (3, 1, 1), "alibi": True},
)


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_a_plan_is_that_of_the_call_itself(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata plan from the spec, an op alone from its tensors."""
    case = Case(query_lens=(1, 1, 40), seq_lens=(50, 33, 80), head_dim=16).but(**features)
    problem, seen = make_problem(case, DEVICE), []
    metadata = TritonMetadataBuilder(problem.spec, DEVICE).build(problem.common)
    plan, module = plan_of(metadata), import_module("pagedattn.ops.paged_attention")
    monkeypatch.setattr(module, "execute", lambda *planned: seen.append(planned))
    problem.run(TritonBackend)
    (planned, inputs) = seen[-1]
    own = plan_call(inputs)
    assert plan.serves(inputs) and own.shape == plan.shape == planned.shape and plan.bounds == planned.bounds
    assert own.bounds == plan.bounds._replace(max_prompt_keys=0), "lengths that the host knows are the metadata's alone"
    assert own.launches == plan.launches == planned.launches


def test_keys_of_prompts_are_bounded_by_their_own_lengths() -> None:
    """Not by those of decodes, where the host knows them."""
    common = make_problem(Case(query_lens=(1, 9, 5), seq_lens=(300, 20, 30), head_dim=16), DEVICE).common
    for known, keys in ((common, 30), (common.replace(seq_lens_cpu=None), 300)):
        bounds = plan_of(TritonMetadataBuilder(SPEC, DEVICE).build(known)).bounds
        assert bounds.part(1, 3, 9).max_seq_len == bounds.part(2, 3, 5).max_seq_len == keys
        assert bounds.max_seq_len == bounds.part(0, 1, 1).max_seq_len == bounds.part(0, 2, 9).max_seq_len == 300


def test_prompts_on_long_contexts_without_the_kernel_for_hopper() -> None:
    """Launches of the decode kernel, with room for both."""
    for lens in ((40,), (1, 1, 40)):
        metadata = TritonMetadataBuilder(SPEC, CPU).build(step(*lens, keys=3000))
        plan = plan_of(metadata)
        assert plan.tile_schedule is None and plan.workspace is not None
        last = plan.launches[-1]
        assert (last.span.kernel, last.span.max_query_len) == ("decode", 40)
        assert metadata.describe().count("decode kernel") == len({*lens}) and isinstance(last.config, DecodeConfig)
        assert plan.workspace.numel() >= last.config.workspace


def test_several_tokens_of_many_sequences_are_the_prompt_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    monkeypatch.setattr(cascade, "SAVED_BYTES", 0)
    builder = TritonMetadataBuilder(SPEC, DEVICE)
    many = step(*[8] * 80, device=DEVICE)
    assert builder.build(many).describe() == "prefill kernel: 80 sequences (for Hopper)"
    sharing = builder.build(many.replace(shared_prefix_len=384))
    assert sharing.describe().startswith("decode kernel: 80 sequences") and sharing.shares_prefix
    assert builder.build(step(*[8] * 20, device=DEVICE)).describe() == "prefill kernel: 20 sequences (for Hopper)"
    assert "decode kernel" in builder.build(step(*[2] * 20, device=DEVICE)).describe(), "few rows"


def test_a_deterministic_step_has_no_workspace() -> None:
    metadata = TritonMetadataBuilder(SPEC.replace(deterministic=True), CPU).build(step(1, 1))
    assert workspace(metadata) is None
    assert metadata.describe().startswith("prefill kernel: 2 sequences (the portable one: ")


def test_one_workspace_that_grows() -> None:
    builder = TritonMetadataBuilder(SPEC, CPU)
    first, again, small = (workspace(builder.build(step(*lens))) for lens in ((1, 1), (1, 1), (1,)))
    assert first is not None and first is again is small
    assert not first[: 3 * COUNTERS].any()
    large = workspace(builder.build(step(*[1] * 8, keys=8000)))
    assert large is not None and large.numel() > first.numel()
    assert workspace(builder.build(step(1, 1))) is large
    assert workspace(builder.build(step(40))) is None


def test_a_captured_step_keeps_its_own() -> None:
    builder = TritonMetadataBuilder(SPEC, CPU)
    eager = workspace(builder.build(step(1, 1)))
    captured = builder.build(step(1, 1), capture=True)
    mine = workspace(captured)
    assert mine is not None and mine is not eager
    builder.build(step(*[1] * 8, keys=8000), capture=True)
    assert builder.build(step(1, 1, keys=90), into=captured) is captured and workspace(captured) is mine


def test_a_step_first_built_inside_a_capture_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What zeroes its counters is only recorded then, and runs when that one graph does."""
    builder = TritonMetadataBuilder(SPEC, CPU)
    monkeypatch.setattr(triton_metadata, "_is_being_captured", lambda device: True)
    first, second = (workspace(builder.build(step(1, 1))) for _ in range(2))
    assert first is not None and second is not None and first is not second
    monkeypatch.undo()
    later = workspace(builder.build(step(1, 1)))
    assert later is not first and later is not second


def listed(plan: LaunchPlan) -> list[list[int]]:
    """First token, tokens and sequence of each tile."""
    assert plan.tile_schedule is not None
    entries = plan.tile_schedule[2 : 2 + int(plan.tile_schedule[1, 0])]
    return entries[:, [0, 1, 4]].tolist()


def test_on_hopper_prompts_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda device: "")
    spec = SPEC.replace(dtype=torch.float16, head_dim=64, block_size=None)
    builder = TritonMetadataBuilder(spec, DEVICE)
    metadata = builder.build(step(1, 1, 400, 33, keys=1500, device=DEVICE))
    assert "prefill kernel: 2 sequences (for Hopper" in metadata.describe()
    tokens = sm90.tokens_per_tile(sm90.heads_per_tile(spec.gqa_ratio))
    expected = [[2 + done, min(tokens, 400 - done), 0] for done in range(0, 400, tokens)][::-1]
    expected += [[402 + done, min(tokens, 33 - done), 1] for done in range(0, 33, tokens)][::-1]
    assert sorted(listed(plan_of(metadata))) == sorted(expected)
    joined = builder.build(step(1, 1, 400, device=DEVICE))
    assert joined.describe() == "prefill kernel: 3 sequences (for Hopper)" and [0, 1, 0] in listed(plan_of(joined))
    assert sm90.why_not(triton_metadata.shape_of_spec(spec), "") == ""
    captured = builder.build(step(40, 33, device=DEVICE), capture=True)
    builder.build(step(20, device=DEVICE), into=captured)
    assert sum(count for _, count, _ in listed(plan_of(captured))) == 20
    captured.common.query_start_loc[1:] += 7
    builder.device_update(captured)
    assert sum(count for _, count, _ in listed(plan_of(captured))) == 27
