"""Where logits are huge, nearly equal ones decide a row by their rounding, and where they are long sums, the order of
summation does: that is no fault, and faults are found."""

from __future__ import annotations

from collections.abc import Callable
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
LONG = Case(heads=(16, 1), head_dim=576, head_dim_v=128, scale=0.1, query_lens=(2, 1), seq_lens=(40, 9), paged=False)


def sequences(problem: Problem) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    assert problem.key is not None and problem.value is not None
    lens = problem.case.query_lens, problem.case.seq_lens, problem.case.seq_lens
    parts = zip((problem.query, problem.key, problem.value), lens, strict=True)
    return list(zip(*(x.split(n) for x, n in parts), strict=True))


def answer(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded outputs and LSE of the oracle, with other options than the problem's."""
    options = {"scale": problem.spec.softmax_scale, **changes}
    outs, lses = zip(*(attention_oracle(*parts, **options) for parts in sequences(problem)), strict=True)
    return torch.cat(outs).float(), torch.cat(lses)


def tree(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Products [H, M, K] x [H, K, N] added up in pairs, in float32."""
    return interpreter.product(a, b, np.dtype(np.float32))


def chain(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same one after another, as a GPU's fused multiply-adds do."""
    total = np.zeros((len(a), a.shape[1], b.shape[2]), np.float32)
    for at in range(a.shape[2]):
        exact = a[:, :, at, None].astype(np.float64) * b[:, at, None].astype(np.float64)
        total = (total + exact).astype(np.float32)
    return total


def backwards(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return chain(a[..., ::-1], b[:, ::-1])


CASES = [(HUGE, tree), (LONG, chain), (LONG, backwards)]


def another_order(problem: Problem, product: Callable[..., np.ndarray[Any, Any]]) -> torch.Tensor:
    """A float32 implementation whose products are summed in another order than torch's, the same on every CPU."""
    outs = []
    for q, k, v in sequences(problem):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        parts = (q.transpose(0, 1).numpy(), k.permute(1, 2, 0).numpy())
        logits = torch.from_numpy(product(*parts)) * problem.spec.softmax_scale
        later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(logits.shape[2] - logits.shape[1] + 1)
        outs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outs)


def close(problem: Problem, out: torch.Tensor, condition: torch.Tensor | None) -> None:
    assert_close("huge", out, problem.expected, problem.naive, condition=condition)


@pytest.mark.parametrize(("case", "product"), CASES, ids=["huge", "long", "backwards"])
def test_another_order_of_summation_is_close_and_only_the_condition_shows_it(case: Case, product: Any) -> None:
    missed = 0
    for seed in range(12):
        problem = make_problem(case, seed=seed)
        out = another_order(problem, product)
        close(problem, out, condition_of(problem))
        try:
            close(problem, out, None)
        except AssertionError:
            missed += 1
    assert missed


def condition_of(problem: Problem) -> torch.Tensor:
    """`Problem.condition`, of problems that need not have it."""
    count, scale = problem.case.query_lens, problem.spec.softmax_scale
    answers = (problem.expected.split(count), problem.expected_lse.split(count))
    parts = zip(sequences(problem), *answers, strict=True)
    return torch.cat([logit_condition(*rows[:3], out, lse, scale=scale) for rows, out, lse in parts])


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


def test_a_scale_that_is_off_by_1e_4_is_found_in_outputs_of_long_sums() -> None:
    for seed in range(6):
        problem = make_problem(LONG, seed=seed)
        out = answer(problem, scale=0.1 * 1.0001)[0]
        with pytest.raises(AssertionError, match="max error"):
            close(problem, out, condition_of(problem))


def test_a_scale_that_is_off_by_1e_4_is_found_in_the_lse() -> None:
    problem = make_problem(HUGE)
    right = answer(problem)[1]
    assert_lse_close("lse", right, problem.expected_lse, torch.float32)
    with pytest.raises(AssertionError, match="LSE is off"):
        assert_lse_close("lse", answer(problem, scale=32**-0.5 * 1.0001)[1], problem.expected_lse, torch.float32)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("options", [{}, {"mask": Mask(False)}, {"mask": Mask(True, 3)}], ids=str)
def test_the_condition_is_what_roundings_of_the_logits_do(options: dict[str, Any], softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 8, dtype=torch.float64) for n, heads in ((5, 4), (7, 2), (7, 2)))
    options = {**options, "scale": 2.0, "softcap": softcap}
    out, lse = attention_oracle(q, k, v, **options)
    squared = torch.zeros_like(out)
    for key in range(len(k)):
        changed = k.clone()
        changed[key] *= 1 + 1e-7  # the logits of a key, before a cap, scale with it
        moved = (attention_oracle(q, changed, v, **options)[0] - out) / 1e-7
        products = 2.0 * q * k[key].repeat_interleave(2, 0)
        logit, root = products.sum(-1).abs(), (products**2).sum(-1).sqrt()
        capped = logit if softcap is None else softcap * torch.tanh(logit / softcap)
        slope = 1.0 if softcap is None else 1 - (capped / softcap) ** 2
        off = 8**0.5 / 2 * (logit + root) + capped / slope
        squared += (moved * (off / logit)[..., None]) ** 2
    got = logit_condition(q, k, v, out, lse, **options)
    torch.testing.assert_close(got, squared.sqrt(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_only_huge_logits_are_given_a_condition(magnitude: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        problem = make_problem(Case(magnitude=magnitude, dtype=dtype))
        assert (problem.condition is not None) == (magnitude > 1 and dtype != torch.bfloat16)


def test_what_two_caches_have_is_weighted_by_rounded_sums() -> None:
    lens = {"query_lens": (3, 3), "seq_lens": (64, 34), "block_size": 32}
    of_two, of_one = (make_problem(Case(**lens, kv_cache_dtype=name)) for name in ("int4", "int8"))
    assert of_two.condition is not None and of_one.condition is None
