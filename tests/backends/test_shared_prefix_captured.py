"""Captured steps that read a shared prefix once: their replays share what they do, which may be another prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends.test_shared_prefix import DEVICE, ONE, SPEC, length_of, plan_of, read, step

from pagedattn import Attention, plan_step
from pagedattn.backends.triton.metadata import TritonMetadataBuilder
from pagedattn.ops import attention_plan
from pagedattn.testing.case import Case
from pagedattn.testing.problem import make_problem


def test_a_captured_step_shares_what_it_is_told() -> None:
    """Whether it pays is known of its replays alone."""
    assert length_of(step(2, 64, 16), capture=True) == 64 and length_of(step(2, 64, 16)) == 0
    assert length_of(step(2, 64, 16).replace(shared_prefix_len=0), capture=True) == 0
    assert length_of(step(2, 64, 16), SPEC.replace(sliding_window=4096), capture=True) == 0


def test_a_captured_split_follows_the_steps_that_use_it() -> None:
    builder = TritonMetadataBuilder(SPEC, torch.device("cpu"))
    metadata = builder.build(step(3, 32, 20), capture=True)
    _, cascade = plan_of(metadata)
    tensor = cascade.tensor
    builder.build(step(2, 48, 4), into=metadata)
    assert cascade.length == 48 and "prefix of 48 keys" in metadata.describe()
    assert read(metadata) == ([0, 2, 48], [4, 4, 0], [[3], [7], [0]])
    builder.build(step(1, 0, 20), into=metadata)
    assert read(metadata)[:2] == ([0, 1, 0], [20, 0, 0])
    assert plan_of(metadata)[1].tensor is tensor
    # A graph that recorded the update knows no length but the one on the device.
    builder.build(step(2, 48, 4), into=metadata)
    tensor[2] = 16
    builder.device_update(metadata)
    assert tensor[3:6].tolist() == [36, 36, 0] and tensor[6:].view(3, 4).tolist()[1] == [1, 2, 7, -1]


@pytest.mark.parametrize("shared", [0, 16, 32, 64])
@pytest.mark.parametrize("captured", [0, 32])
def test_a_captured_step_reads_all_of_a_later_one(shared: int, captured: int) -> None:
    """Another step's prefix may be shorter or longer, or none."""
    layer = Attention(4, 16, 2, backend="TRITON", block_size=16, device=DEVICE)
    problem = make_problem(replace(Case(**ONE), seq_lens=(100, 100, 100, 100)), DEVICE)
    static = plan_step([layer], problem.common.replace(shared_prefix_len=captured), capture=True)
    lengths = {"query_lens": (1, 1, 0), "seq_lens": (67, 64, 0)}
    other = make_problem(replace(Case(**ONE), **lengths, shared_prefix=shared, write=False), DEVICE)
    plan_step([layer], other.common, into=static)
    assert static.shares_prefix == (captured > 0) == ("attended once" in static.describe())
    query = torch.nn.functional.pad(other.query, (0, 0, 0, 0, 0, 2))
    out = layer(query, None, None, other.cache, static)
    torch.testing.assert_close(out[:2], other.expected.float())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("by_prompts", [False, True])
def test_a_graph_that_records_the_update_shares_what_later_steps_do(
    by_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the decode kernel in float32, and where the kernel for prompts serves the prefix (on Hopper) in bfloat16."""
    monkeypatch.setattr(attention_plan, "has_prompts_work", lambda *_: by_prompts)
    dtype, dim = (torch.bfloat16, 128) if by_prompts else (torch.float32, 16)
    layer = Attention(4, dim, 2, backend="TRITON", block_size=16, device=DEVICE, dtype=dtype)
    case = replace(Case(**ONE), seq_lens=(100, 67, 64, 90), head_dim=dim, dtype=dtype, write=False)
    problem = make_problem(case, DEVICE)
    static = plan_step([layer], problem.common, capture=True)
    (metadata,) = static.by_key.values()
    query = torch.zeros_like(problem.query)
    layer(query, None, None, problem.cache, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.builder.device_update(metadata)
        out = layer(query, None, None, problem.cache, static)
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if by_prompts else {}
    for shared in (64, 0, 16):
        other = make_problem(replace(case, shared_prefix=shared), DEVICE)
        cache, there = other.cache, problem.cache
        assert cache is not None and there is not None and cache.key.shape == there.key.shape
        there.key.copy_(cache.key)
        there.value.copy_(cache.value)
        query.copy_(other.query)
        plan_step([layer], other.common, into=static)
        graph.replay()
        torch.testing.assert_close(out.float(), other.expected.float(), **close)
