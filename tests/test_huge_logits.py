"""Where logits are huge, nearly equal ones decide a row by their rounding: that is no fault, and faults are found."""

from __future__ import annotations

from typing import Any

import interpreter
import numpy as np
import pytest
import torch

from pagedattn import Mask
from pagedattn.testing import Case, Problem, assert_close, attention_oracle, make_problem
from pagedattn.testing.compare import assert_lse_close
from pagedattn.testing.oracle import logit_condition

HUGE = Case(magnitude=30.0, paged=False)


def sequences(problem: Problem) -> list[tuple[torch.Tensor, ...]]:
    assert problem.key is not None and problem.value is not None
    lens = problem.case.query_lens, problem.case.seq_lens, problem.case.seq_lens
    parts = zip((problem.query, problem.key, problem.value), lens, strict=True)
    return list(zip(*(x.split(n) for x, n in parts), strict=True))


def answer(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded outputs and LSE of the oracle, with other options than the problem's."""
    options = {"scale": problem.spec.softmax_scale, **changes}
    outs, lses = zip(*(attention_oracle(*parts, **options) for parts in sequences(problem)), strict=True)
    return torch.cat(outs).float(), torch.cat(lses)


def another_order(problem: Problem) -> torch.Tensor:
    """A float32 implementation whose products are summed in another order than torch's, the same on every CPU."""
    outs = []
    for q, k, v in sequences(problem):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        parts = (q.transpose(0, 1).numpy(), k.permute(1, 2, 0).numpy())
        logits = torch.from_numpy(interpreter.product(*parts, np.dtype(np.float32))) * problem.spec.softmax_scale
        later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(logits.shape[2] - logits.shape[1] + 1)
        outs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outs)


def close(problem: Problem, out: torch.Tensor, condition: torch.Tensor | None) -> None:
    assert_close("huge", out, problem.expected, problem.naive, condition=condition)


def test_another_order_of_summation_is_close_and_only_the_condition_shows_it() -> None:
    missed = 0
    for seed in range(12):
        problem = make_problem(HUGE, seed=seed)
        out = another_order(problem)
        close(problem, out, problem.condition)
        try:
            close(problem, out, None)
        except AssertionError:
            missed += 1
    assert missed


FAULTS: dict[str, dict[str, Any]] = {"scale": {"scale": 32**-0.5 * 1.001}, "window": {"mask": Mask(True, 30)}}


@pytest.mark.parametrize("fault", [*FAULTS, "key", "value"])
def test_a_fault_is_found_in_the_outputs(fault: str) -> None:
    found = 0
    for seed in range(6):
        problem = make_problem(HUGE, seed=seed)
        tensor = {"key": problem.key, "value": problem.value}.get(fault)
        if tensor is not None:
            tensor[50] = tensor[42]  # of the last sequence, 42..81
        try:
            close(problem, answer(problem, **FAULTS.get(fault, {}))[0], problem.condition)
        except AssertionError:
            found += 1
    assert found >= 3


def test_a_scale_that_is_off_by_1e_4_is_found_in_the_lse() -> None:
    problem = make_problem(HUGE)
    right = answer(problem)[1]
    assert_lse_close("lse", right, problem.expected_lse, torch.float32)
    with pytest.raises(AssertionError, match="LSE is off"):
        assert_lse_close("lse", answer(problem, scale=32**-0.5 * 1.0001)[1], problem.expected_lse, torch.float32)


@pytest.mark.parametrize("options", [{}, {"mask": Mask(False)}, {"mask": Mask(True, 3)}], ids=str)
def test_the_condition_is_what_relative_errors_of_the_logits_do(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 8, dtype=torch.float64) for n, heads in ((5, 4), (7, 2), (7, 2)))
    out, lse = attention_oracle(q, k, v, scale=2.0, **options)
    moved = torch.zeros_like(out)
    for key in range(len(k)):  # all logits of a key scale with it
        changed = k.clone()
        changed[key] *= 1 + 1e-7
        moved += (attention_oracle(q, changed, v, scale=2.0, **options)[0] - out).abs() / 1e-7
    torch.testing.assert_close(logit_condition(q, k, v, out, lse, scale=2.0, **options), moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_only_huge_logits_are_given_a_condition(magnitude: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        problem = make_problem(Case(magnitude=magnitude, dtype=dtype))
        assert (problem.condition is not None) == (magnitude > 1 and dtype != torch.bfloat16)
