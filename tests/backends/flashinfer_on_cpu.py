"""The FLASHINFER adapter on CPU tensors, over the stand-in, and its answers held against the oracle's."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import fake_flashinfer
import pytest
import torch

import pagedattn.backends.flashinfer.backend as adapter
from pagedattn import AttentionCall
from pagedattn.backends.flashinfer import plan
from pagedattn.spec import Capabilities
from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_close, assert_lse_close
from pagedattn.testing.problem import Problem, make_problem

CPU = torch.device("cpu")
ENDS = (adapter.RELEASES.oldest, adapter.RELEASES.newest)  # of what the adapter serves
HALF: dict[str, Any] = {"head_dim": 64, "dtype": torch.float16}
MIXED = Case(**HALF, query_lens=(1, 1, 9, 5), seq_lens=(20, 37, 24, 5))
DECODES = Case(**HALF, query_lens=(1, 1, 1), seq_lens=(20, 64, 3))


class OnCpu(adapter.FlashInferBackend):
    """The adapter, were the library one for CPUs."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), devices=("cpu",))


def install(patch: pytest.MonkeyPatch, release: str = adapter.RELEASES.oldest) -> Any:
    """Make the stand-in the installed flashinfer, with no workspace shared yet and a small one to begin with."""
    patch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    patch.setattr(adapter, "_availability", lambda: adapter.Availability(ok=True, version=release))
    patch.setattr(fake_flashinfer, "inf", None)  # what `behave_as` sets is taken back
    fake_flashinfer.behave_as(release)
    patch.setattr(plan, "_shared", {})
    patch.setattr(plan, "START_BYTES", 1 << 20)
    patch.setattr(fake_flashinfer, "needs_bytes", 0)
    patch.setattr(fake_flashinfer, "plans", 0)
    return fake_flashinfer


def written(case: Case, seed: int = 0) -> Problem:
    """A problem whose new keys and values are in the cache."""
    problem = make_problem(case, seed=seed)
    if problem.key is not None and problem.cache is not None:
        OnCpu.impl(problem.spec).write_kv(problem.key, problem.value, problem.cache, problem.common.slot_mapping)
    return problem


def attend(problem: Problem, metadata: Any, query: torch.Tensor | None = None) -> torch.Tensor:
    """The output, after output and LSE were compared with the oracle's."""
    rows, query = len(problem.expected), problem.query if query is None else query
    packed = (problem.key, problem.value) if problem.cache is None else (None, None)
    lse = torch.full(query.shape[:2], torch.nan)
    out = OnCpu.impl(problem.spec).forward(AttentionCall(query, problem.cache, *packed, lse=lse), metadata)
    assert len(out) == len(query)
    assert_close("output", out[:rows], problem.expected, problem.naive)
    assert_lse_close("LSE", lse[:rows], problem.expected_lse, problem.case.dtype)
    return out


def builder_of(problem: Problem, **options: Any) -> Any:
    return OnCpu.builder(problem.spec, CPU, **options)
