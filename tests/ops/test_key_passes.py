"""Prompts whose keys are too many for one copy: passes over blocks of keys, whose results are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache, ops
from pagedattn.formats.registry import format_of
from pagedattn.kernels import hopper
from pagedattn.kernels.dequantise import plan as dequantise
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill_sm90.plan import params_of
from pagedattn.kernels.shape import INT4, K8V4, AttentionShape, BatchBounds, bounds_of, shape_of
from pagedattn.ops.attention_plan import plan_attention, plan_passes
from pagedattn.ops.launch_plan import KernelLaunch, LaunchPlan, Span
from pagedattn.ops.paged_attention import execute
from pagedattn.runtime.workspace import new_workspace

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    torch.bfloat16, torch.uint8, 8, 4, 128, 128, Mask(causal=True).constants, False, True, False, 32,
    ("int4_per_channel", "rotated_int4"),
)  # fmt: skip
LONG = BatchBounds(2048, 1, 0, 2048, 200_000, 200_000)
QUERIES, KEYS = (1, 20, 40, 17, 20), (200, 300, 130, 17, 420)


def test_a_pass_has_as_many_keys_as_a_copy_has_room_for() -> None:
    def keys(**bounds: int) -> int:
        return dequantise.keys_per_pass(SHAPE, LONG._replace(**bounds), 128)

    def one_of(bounds: BatchBounds) -> LaunchPlan:
        return replace(plan_attention(SHAPE, bounds, CPU), passes=plan_passes(SHAPE, bounds, CPU))

    assert dequantise.copy_turns(SHAPE, LONG) == 0 and keys() == 1 << 14, "of all heads"
    assert keys(num_seqs=6) == 2688 and keys(num_seqs=70, num_decodes=64) == 2688
    assert keys(num_seqs=16) == 2048 and keys(num_seqs=100) == 1280, "of two heads, and of one"
    assert keys(num_seqs=1025) == 0 and keys(max_query_len=8) == 0
    assert dequantise.keys_per_pass(SHAPE._replace(codes=(None, None)), LONG, 128) == 0
    for count, bounds in ((1, LONG), (6, LONG._replace(num_seqs=6)), (100, LONG._replace(num_seqs=100))):
        most = keys(num_seqs=count)
        passes = plan_passes(SHAPE, bounds, CPU)
        assert [one.first * 32 for one in passes] == [*range(0, 200_000, most)]
        assert all((one.last - one.first) * 32 == one.plan.bounds.max_keys == most for one in passes)
        turns = dequantise.copy_turns(SHAPE, passes[0].plan.bounds)
        assert one_of(bounds).num_launches == 0, "they are added up by torch"
        assert turns and most * count * 512 * (8 // turns) <= dequantise.MOST_BYTES


def test_a_pass_over_tensors_that_the_hopper_kernel_cannot_read_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it would read others of their shape."""
    monkeypatch.setattr(hopper, "why_not_here", lambda _device: "")
    shape = SHAPE._replace(stored_dtype=torch.int8, codes=K8V4)
    bounds = LONG._replace(num_tokens=100, max_query_len=100)
    assert not plan_attention(shape, bounds, CPU).passes
    plan = plan_attention(shape, bounds, CPU, not_sm90="strides that TMA cannot follow")
    assert plan.passes and all(one.plan.copy_turns for one in plan.passes)


@pytest.mark.parametrize("codes", [K8V4, INT4])
def test_long_prompts_go_in_passes_where_those_are_faster_than_converting(
    codes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "why_not_here", lambda _device: "")
    shape = SHAPE._replace(stored_dtype=torch.int8, codes=codes)
    plan = plan_attention(shape, LONG, CPU)
    assert plan.passes and all(one.plan.copy_turns for one in plan.passes)
    assert not plan_attention(shape, LONG._replace(max_query_len=100), CPU).passes, "of few rows"
    assert not plan_attention(shape._replace(codes=("int8", "int8")), LONG, CPU).passes


@pytest.mark.parametrize(
    ("stored", "mask"),
    [
        ("int8", Mask(True)),
        ("k8v4", Mask(False)),
        ("int8", Mask(True, sliding_window=290)),
        ("int4", Mask(True, earlier_blocks=32, recent_blocks=1, from_block=5)),
    ],
)
def test_passes_leave_what_one_call_does(stored: str, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes of 128 keys, by the portable kernel: of which sequence 3 has none but in the first one."""
    if torch.cuda.is_available():
        pytest.skip("interpreted; backends/test_dequantised_prompts.py runs passes on a GPU")
    form, heads, dim = format_of(stored), 2, 16
    options: dict[str, Any] = {"kv_cache_dtype": stored, "recent_blocks": 1 if form.whole_blocks else None}
    cache = PagedKVCache(1, 48, 32, heads, dim, dtype=torch.float32, **options).layer(0)
    make = torch.Generator().manual_seed(1)
    for rows, planes in zip((form.key, form.value), cache.sides, strict=True):
        for plane, codes in zip(planes, rows.encode(torch.randn(48, 32, heads, dim, generator=make)), strict=True):
            plane.copy_(codes)
    table = torch.randperm(48, generator=make).int()[: 5 * 9].view(5, 9)
    table = torch.cat((table, table.flip(0)), 1)[:, :14]
    starts, lens = torch.tensor([0, *QUERIES]).cumsum(0).int(), torch.tensor(KEYS).int()
    query, sinks = torch.randn(sum(QUERIES), 4, dim, generator=make), torch.tensor([0.5, -1.0, 2.0, 0.0])
    given: dict[str, Any] = {"scale": 0.3, "sinks": sinks, "mask": mask, "num_decodes": 1, **cache.stored}
    given |= {"max_query_len": max(QUERIES), "max_seq_len": max(KEYS), "out": torch.empty_like(query), "path": "torch"}
    lse = torch.empty(len(query), 4)
    want = ops.paged_attention(query, cache.key, cache.value, table, starts, lens, lse=lse, **given)

    monkeypatch.setattr(dequantise, "MOST_BYTES", 4 * 128 * heads * 2 * 64 * 4)
    monkeypatch.setattr(dequantise, "_FEWEST_KEYS", 1)
    monkeypatch.setattr(dequantise, "_FEWEST_OTHER_ROWS", 1)
    monkeypatch.setattr(dequantise, "_FEWEST_ROWS", {})
    for keep_lse in (True, False):
        out, own = torch.full_like(query, torch.nan), torch.full_like(lse, torch.nan)
        tensors = (query, cache.key, cache.value, table, starts, lens, sinks, None, None, None, out)
        bounds = (max(QUERIES), max(KEYS), 1, False, cache.key_scale, cache.value_scale, stored)
        inputs = AttentionInputs(*tensors, own if keep_lse else None, 0.3, 1.0, mask.constants, 0.0, *bounds)
        shape = shape_of(inputs)
        base = plan_attention(shape, bounds_of(inputs), CPU)
        prompts = KernelLaunch(Span("prefill_sm90", 1, 5, 40), params_of(shape, bounds_of(inputs), 132))
        passes = plan_passes(shape, bounds_of(inputs), CPU)
        plan = LaunchPlan(shape, bounds_of(inputs), (base.launches[0], prompts), "", passes=passes)
        assert len(passes) == 4 and "in 4 passes over their keys" in plan.describe() and not plan.accumulates
        plan.workspace = new_workspace(base.workspace_size, CPU)
        plan.allocate(CPU, table)
        plan.update(starts, lens, table)
        execute(plan, inputs)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        if keep_lse:
            torch.testing.assert_close(own, lse, rtol=2e-5, atol=2e-5)
