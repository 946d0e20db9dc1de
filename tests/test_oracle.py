"""The oracle is right where torch or arithmetic can say so, every feature changes it, and errors do not pass."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch

from pagedattn import Mask
from pagedattn.backends.registry import get_backend
from pagedattn.testing import assert_close, attention_oracle
from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_lse_close
from pagedattn.testing.problem import make_problem

Q, K, V = torch.randn(7, 6, 16).double(), torch.randn(23, 2, 16).double(), torch.randn(23, 2, 8).double()
FIRST = 23 - 7  # the position of query row 0


def oracle(query: torch.Tensor = Q, key: torch.Tensor = K, value: torch.Tensor = V, **changes: Any) -> torch.Tensor:
    return attention_oracle(query, key, value, **{"scale": 0.25, **changes})[0]


def allowed(causal: bool, window: int | None) -> torch.Tensor:
    """[7, 23] of what each row may see, one element at a time."""
    keep = torch.zeros(7, 23, dtype=torch.bool)
    for i in range(7):
        for j in range(23):
            behind = FIRST + i - j
            seen = behind >= 0 if causal else True
            keep[i, j] = seen and (window is None or abs(behind) < window)
    return keep


MASKS = [(True, None), (False, None), (True, 1), (True, 5), (False, 5), (True, 100)]


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_it_is_torchs_attention(causal: bool, window: int | None) -> None:
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (Q, K, V)), attn_mask=allowed(causal, window), scale=0.25, enable_gqa=True
    )
    assert torch.allclose(oracle(mask=Mask(causal, window)), want[0].transpose(0, 1), atol=1e-12)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_keys_of_zero_give_the_mean_over_what_is_allowed(causal: bool, window: int | None) -> None:
    positions = torch.arange(23.0).double()[:, None, None].expand(23, 2, 1)
    keep = allowed(causal, window)
    want = (keep * torch.arange(23.0)).sum(1) / keep.sum(1)
    out, lse = attention_oracle(Q, torch.zeros_like(K), positions, scale=1.0, mask=Mask(causal, window))
    assert torch.allclose(out[..., 0], want.double()[:, None].expand(7, 6), atol=1e-12)
    assert torch.allclose(lse, keep.sum(1).double().log()[:, None].expand(7, 6), atol=1e-12)


def test_a_query_head_reads_the_key_head_of_its_group() -> None:
    value = torch.zeros(23, 2, 1).double()
    value[:, 1] = 1.0
    assert oracle(value=value)[0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_by_hand(causal: bool) -> None:
    slopes = torch.linspace(0.1, 0.6, 6)
    got = oracle(key=torch.zeros_like(K), alibi_slopes=slopes, mask=Mask(causal))
    for i in (0, 3, 6):
        for h in range(6):
            end = FIRST + i + 1 if causal else 23
            weight = torch.tensor([math.exp(-float(slopes[h]) * abs(FIRST + i - j)) for j in range(end)]).double()
            want = weight @ V[:end, h // 3] / weight.sum()
            assert torch.allclose(got[i, h], want, atol=1e-7)


def test_a_sink_is_one_more_logit_without_a_value() -> None:
    plain, lse = attention_oracle(Q, K, V, scale=0.25)
    out, with_sink = attention_oracle(Q, K, V, scale=0.25, sinks=torch.full((6,), 1.5))
    share = torch.sigmoid(lse - 1.5)
    assert torch.allclose(out, plain * share[..., None], atol=1e-12)
    assert torch.allclose(with_sink, torch.logaddexp(lse, torch.tensor(1.5).double()), atol=1e-12)


def test_the_soft_cap_comes_before_the_mask_and_after_the_scale() -> None:
    huge = oracle(query=Q * 1e6, softcap=2.0, mask=Mask(True, 1))
    assert torch.allclose(huge, V[FIRST:].repeat_interleave(3, 1), atol=1e-12)
    one = oracle(query=Q, softcap=3.0)
    logits = 3.0 * torch.tanh(torch.einsum("qhd,khd->hqk", Q, K.repeat_interleave(3, 1)) * 0.25 / 3.0)
    weights = logits.masked_fill(~allowed(True, None), -math.inf).softmax(-1)
    assert torch.allclose(one, torch.einsum("hqk,khd->qhd", weights, V.repeat_interleave(3, 1)), atol=1e-12)


def test_rows_without_keys_are_empty_states() -> None:
    out, lse = attention_oracle(Q, K[:4], V[:4], scale=0.25)
    assert not out[:3].any() and bool((lse[:3] == -math.inf).all()) and bool(lse[3:].isfinite().all())
    out, lse = attention_oracle(Q, K[:0], V[:0], scale=0.25)
    assert not out.any() and bool((lse == -math.inf).all())
    out, lse = attention_oracle(Q, K[:0], V[:0], scale=0.25, sinks=torch.full((6,), 0.7))
    assert not out.any() and torch.allclose(lse, torch.tensor(0.7).double(), atol=1e-7)


@pytest.mark.parametrize(
    "feature",
    [
        {"mask": Mask(False)},
        {"mask": Mask(True, 22)},
        {"mask": Mask(True, 5)},
        {"softcap": 30.0},
        {"alibi_slopes": torch.full((6,), 0.01)},
        {"sinks": torch.full((6,), -2.0)},
        {"scale": 0.26},
    ],
    ids=lambda feature: "-".join(f"{name}={value}"[:20] for name, value in feature.items()),
)
def test_every_feature_changes_the_answer(feature: dict[str, Any]) -> None:
    assert float((oracle(**feature) - oracle()).abs().max()) > 1e-5


def test_neighbouring_windows_differ() -> None:
    answers = [oracle(mask=Mask(True, window)) for window in range(1, 23)]
    for one, other in pairwise(answers):
        assert float((one - other).abs().max()) > 1e-4


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INPUTS = {dtype: {"query": Q.to(dtype), "key": K.to(dtype), "value": V.to(dtype)} for dtype in DTYPES}
REFERENCE = {dtype: oracle(**inputs) for dtype, inputs in INPUTS.items()}
NAIVE = {dtype: oracle(**inputs, dtype=dtype) for dtype, inputs in INPUTS.items()}


def close(actual: torch.Tensor, **changes: Any) -> None:
    assert_close("case", actual, REFERENCE[actual.dtype], NAIVE[actual.dtype], **changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_answer_is_close(dtype: torch.dtype) -> None:
    close(REFERENCE[dtype].to(dtype))
    if dtype != torch.float64:
        close(oracle(**INPUTS[dtype], dtype=torch.float32).to(dtype))


def one_element(out: torch.Tensor, error: float) -> torch.Tensor:
    out[3, 2, 1] += error
    return out


PLANTED = {
    "one element": lambda out: one_element(out, 0.1),
    "one nan": lambda out: one_element(out, math.nan),
    "all a little": lambda out: out * 1.02,
    "one row lost": lambda out: out * (torch.arange(7) != 4)[:, None, None],
    "heads swapped": lambda out: out[:, [3, 1, 2, 0, 4, 5]],
    "rows shifted": lambda out: out.roll(1, 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("error", sorted(PLANTED))
def test_a_planted_error_is_not_close(error: str, dtype: torch.dtype) -> None:
    planted = PLANTED[error](REFERENCE[dtype].clone()).to(dtype)
    for softcap in (False, True):
        with pytest.raises(AssertionError, match="case: "):
            close(planted, softcap=softcap)


def test_a_row_that_should_be_zero_is_exactly_zero() -> None:
    reference = torch.cat((REFERENCE[torch.float32], torch.zeros(1, 6, 8).double()))
    naive = reference.float()
    assert_close("case", naive, reference, naive)
    wrong = naive.clone()
    wrong[-1] = 1e-9
    with pytest.raises(AssertionError, match="row"):
        assert_close("case", wrong, reference, naive)


def test_a_row_of_fp8_queries_is_compared_with_what_they_cost_it() -> None:
    """A small row whose naive error is a tenth, beside rows that have none: gate 2 is far below that."""
    rows = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    reference = torch.cat((100 * rows[:7], rows[7:]))
    naive = reference.clone()
    naive[-1] *= 1.1
    for factor, right in ((0.85, True), (0.75, False), (1.19, True), (1.21, False)):
        got = reference.clone()
        got[-1] *= factor
        check = partial(assert_close, "case", got.bfloat16(), reference, naive, fp8_queries=True)
        with contextlib.nullcontext() if right else pytest.raises(AssertionError, match=r"row \(7, \d\) is off"):
            check()


def test_states_that_are_rounded_have_a_third_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, noise = torch.randn(2, 7, 6, 8, generator=generator).double()
    got = (reference + noise * (2.8e-3 * reference.norm() / noise.norm())).bfloat16()
    naive = reference.clone()
    naive[0, 0, 0] += 1.0  # no gate for single elements
    assert 3e-3 < (got.double() - reference).norm() / reference.norm() < 1.22 * 3e-3
    assert_close("case", got, reference, naive, rounded_states=True)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("case", got, reference, naive)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("case", got + 2 * (got - reference.bfloat16()), reference, naive, rounded_states=True)


def test_gates_are_those_of_what_the_backend_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_backend, seen = get_backend("TORCH"), []
    rounds = replace(torch_backend.capabilities(), rounded_states=True)
    problem = make_problem(Case(dtype=torch.bfloat16))
    module = import_module("pagedattn.testing.conformance")
    monkeypatch.setattr(module, "assert_close", lambda *_, **gates: seen.append(gates["rounded_states"]))
    module.check(torch_backend, problem)
    monkeypatch.setattr(torch_backend, "capabilities", classmethod(lambda cls: rounds))
    module.check(torch_backend, make_problem(Case(dtype=torch.bfloat16)))
    assert seen == [False, True]


def test_lse_is_compared_and_infinities_must_agree() -> None:
    want = torch.tensor([[1.0, -math.inf]]).double()
    assert_lse_close("lse", want.float(), want, torch.float32)
    for wrong in ([[1.001, -math.inf]], [[1.0, -1e4]], [[-math.inf, -math.inf]], [[math.nan, -math.inf]]):
        with pytest.raises(AssertionError, match="lse: LSE is"):
            assert_lse_close("lse", torch.tensor(wrong), want, torch.float32)
