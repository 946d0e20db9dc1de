"""The sampler against plain references, and against itself in other batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn.engine import Request
from pagedattn.engine.sampling.metadata import SamplingMetadataBuilder
from pagedattn.engine.sampling.sampler import AsyncTokens, Sampler, _mix
from pagedattn.engine.sampling_params import SamplingParams

VOCAB = 48
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def request(
    tokens: Sequence[int] = (1, 2, 3),
    prompt_len: int | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    params: SamplingParams | None = None,
    **sampling: Any,
) -> Request:
    params = params or SamplingParams(**sampling)  # to be checked once for many requests
    out = Request(
        "r", array("i", tokens), params, arrival=0, max_total_tokens=99, seed=seed, stop_ids=frozenset(stop_ids)
    )
    out.prompt_len = len(tokens) if prompt_len is None else prompt_len
    return out


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    out = Sampler(logits.shape[1], "cpu").sample(logits, requests)
    assert [token.error for token in out] == [None] * len(requests)
    return [token.token_id for token in out]


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by the definitions, one row, in float64: temperature, top_k, top_p of the rest, min_p."""
    scores = logits.double().numpy() / params.temperature
    order = np.argsort(-scores, kind="stable")
    keep = order[: params.top_k] if params.top_k > 0 else order
    probs = np.exp(scores - scores.max())
    inside = probs[keep] / probs[keep].sum()
    keep = keep[np.cumsum(inside) - inside < params.top_p]
    keep = keep[probs[keep] >= params.min_p * probs.max()]
    out = np.zeros_like(probs)
    out[keep] = probs[keep] / probs[keep].sum()
    return out


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.85},
    {"min_p": 0.05},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_distribution_is_the_reference(case: dict[str, Any]) -> None:
    draws = 20_000
    params = SamplingParams(**case)
    rows = [request([1] * (1 + index % 50), seed=index // 50, params=params) for index in range(draws)]
    got = np.bincount(sample(LOGITS.expand(draws, -1), rows), minlength=VOCAB)
    want = reference_probs(LOGITS, params) * draws
    assert got[want == 0].sum() == 0, "a token that the filters exclude was drawn"
    common = want >= 10
    chi_square = ((got - want)[common] ** 2 / want[common]).sum()
    freedom = common.sum() - 1
    assert freedom >= 3
    # mean of chi-square is its degrees of freedom, variance twice that: five deviations
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_the_distribution_test_can_fail() -> None:
    draws = 20_000
    params = SamplingParams(temperature=1.05)
    rows = [request(seed=index, params=params) for index in range(draws)]
    got = np.bincount(sample(LOGITS.expand(draws, -1), rows), minlength=VOCAB)
    want = reference_probs(LOGITS, SamplingParams()) * draws
    common = want >= 10
    freedom = common.sum() - 1
    assert ((got - want)[common] ** 2 / want[common]).sum() > freedom + 5 * np.sqrt(2 * freedom)


def test_greedy_is_argmax_and_pays_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a greedy batch needs no softmax")

    for name in ("softmax", "log_softmax", "sort", "topk", "cumsum", "log"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    logits = torch.randn(7, VOCAB)
    rows = [request(temperature=0, top_k=3, top_p=0.5, min_p=0.5) for _ in range(7)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


def mixed_rows(count: int) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9},
        {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"min_tokens": 9},
    ]
    return [
        request([5, 6, 7, 7][: 1 + index % 4], 1, seed=index, stop_ids=(3, 4), **kinds[index % len(kinds)])
        for index in range(count)
    ]


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, rows = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2)) * 2, mixed_rows(64)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    assert len(set(together)) > 10


def test_tied_logits_do_not_depend_on_the_batch_either() -> None:
    logits = (torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(4))).round()
    rows = [request(seed=i, top_k=3) if i % 2 else request(seed=i, top_k=20, top_p=0.8) for i in range(64)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_top_p_is_of_what_each_rows_own_top_k_left() -> None:
    """A neighbour with a larger top_k must not add to the whole that top_p is a share of."""
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(8)) * 0.5
    rows = [request(seed=i, top_k=3 if i % 2 else 40, top_p=0.7) for i in range(64)]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_seed_and_position_decide() -> None:
    def draw(seed: int, length: int, tokens: int = 1) -> list[int]:
        rows = [request([tokens] * (length + i), seed=seed) for i in range(64)]
        return sample(torch.zeros(64, VOCAB), rows)

    assert draw(5, 1) == draw(5, 1)
    assert draw(5, 1, tokens=9) == draw(5, 1), "the tokens themselves must not matter"
    assert draw(5, 2)[:-1] == draw(5, 1)[1:], "the same position must give the same token"
    seeds = [5, 6, -6, 2**63 - 1, 1 << 40]
    assert len({tuple(draw(seed, 1)) for seed in seeds}) == len(seeds)


def test_hash_equals_its_definition() -> None:
    values = np.array([0, 1, 2, 151_935, 2**31 - 1, -1, -(2**31)], dtype=np.int64)
    wanted = []
    for value in values.tolist():
        x = value & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
        wanted.append(x ^ x >> 15)
    got = _mix(torch.from_numpy(values.astype(np.int32)).repeat(9)).numpy().view(np.uint32)
    assert got.reshape(9, -1).tolist() == [wanted] * 9


def test_top_k_one_and_tiny_temperature_are_greedy() -> None:
    logits = torch.randn(256, VOCAB, generator=torch.Generator().manual_seed(5))
    best = logits.argmax(-1).tolist()
    cases: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-30}]
    for case in cases:
        assert sample(logits, [request(seed=i, **case) for i in range(256)]) == best, case


def test_penalties() -> None:
    row = request([3, 4, 7, 7, 9], 2, temperature=0, repetition_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    for token, value in ((3, 5.0), (7, 4.0), (8, 2.6), (20, -1.0)):
        logits[0, token] = value
    assert sample(logits, [row]) == [8], "prompt and output tokens are halved"
    logits[0, 8] = 2.4
    assert sample(logits, [row]) == [3]
    negative = torch.full((1, VOCAB), -9.0)
    negative[0, 3], negative[0, 8] = -1.0, -1.9
    assert sample(negative, [row]) == [8], "a negative logit is multiplied"
    frequency = request([3, 4, 7, 7, 9], 2, temperature=0, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9], logits[0, 3] = 3.0, 2.4, 1.3
    assert sample(logits, [frequency]) == [9], "7 came twice (3 - 2), 9 once (2.4 - 1), 3 only in the prompt"
    presence = request([3, 4, 7, 7, 9], 2, temperature=0, presence_penalty=1.0)
    assert sample(logits, [presence]) == [7], "7 loses 1 however often it came"
    bonus = request([3, 4, 7, 7, 9], 2, temperature=0, presence_penalty=-2.0)
    logits[0, 3] = 4.5
    assert sample(logits, [bonus]) == [7]


def test_a_penalty_touches_its_own_row_only() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 1.0
    rows = [request([7], temperature=0, repetition_penalty=penalty) for penalty in (1.0, 9.0, 1.0)]
    logits[:, 8] = 0.5
    before = logits.clone()
    assert sample(logits, rows) == [7, 8, 7]
    assert torch.equal(logits, before), "the model's logits are not written to"


@pytest.mark.parametrize(
    ("case", "expected"),
    [({"repetition_penalty": 9.0}, 8), ({"min_tokens": 9}, 8), ({"logprobs": 1}, 20), ({}, 20)],
    ids=str,
)
def test_what_a_graph_drew_counts_unless_the_scores_differ_from_the_logits(case: dict[str, Any], expected: int) -> None:
    """A graph draws from the logits: 7 is likeliest there, 8 with penalties or stops; only a graph would draw 20."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    rows = [request([7, 7], 1, stop_ids=(7,), temperature=0, **case)]
    sampler = Sampler(VOCAB, "cpu")
    drawn = torch.tensor([20], dtype=torch.int32)
    at = np.zeros(1, dtype=np.int32)
    sampling = SamplingMetadataBuilder(1).build(rows, at) if case else None
    (token,) = sampler.sample_async(logits, sampler._own_state(rows, at), sampling, drawn=drawn).read()
    assert token.token_id == expected
    assert ("logprobs" in case) == (token.logprob is not None)


def test_min_tokens_masks_stop_ids_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5], logits[0, 9] = 5.0, 4.0, 1.0
    stops = (3, 5, 10**6)
    early = request([1, 2, 2], 1, stop_ids=stops, temperature=0, min_tokens=3)
    late = request([1, 2, 2, 2], 1, stop_ids=stops, temperature=0, min_tokens=3)
    assert (early.num_generated, late.num_generated) == (2, 3)
    assert sample(logits, [early]) == [9]
    assert sample(logits, [late]) == [3]
    drawn = sample(logits.expand(500, -1), [request([1], seed=i, stop_ids=stops, min_tokens=1) for i in range(500)])
    assert not set(drawn) & {3, 5}


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [
        request(temperature=0, logprobs=3),
        request(temperature=0),
        request(seed=1, temperature=2.0, top_k=5, repetition_penalty=3.0, logprobs=0),
        request(temperature=0, logprobs=20),
    ]
    out = Sampler(VOCAB, "cpu").sample(logits, rows)
    wanted = logits.double().log_softmax(-1)
    for row in (0, 2, 3):
        assert out[row].logprob == pytest.approx(wanted[row, out[row].token_id].item(), abs=1e-5)
        best = wanted[row].topk(rows[row].sampling.logprobs or 0)
        assert list(out[row].top_logprobs or {}) == best.indices.tolist()
        assert list((out[row].top_logprobs or {}).values()) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (out[1].logprob, out[1].top_logprobs) == (None, None)
    assert out[2].top_logprobs == {}


def test_more_logprobs_than_tokens() -> None:
    (out,) = Sampler(3, "cpu").sample(torch.randn(1, 3), [request(logprobs=20)])
    assert len(out.top_logprobs or {}) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_bad_row_is_reported_and_its_neighbours_are_not(bad: float, case: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    rows = [request(seed=i, logprobs=2, **case) for i in range(3)]
    sampler = Sampler(VOCAB, "cpu")
    good = sampler.sample(logits, rows)
    broken = logits.clone()
    broken[1, 11] = bad
    out = sampler.sample(broken, rows)
    assert (out[1].token_id, out[1].logprob) == (-1, None)
    assert "finite" in (out[1].error or "")
    assert [out[0], out[2]] == [good[0], good[2]]


def test_a_row_with_every_token_masked_is_an_error() -> None:
    row = request(stop_ids=range(VOCAB), min_tokens=1, temperature=0)
    (out,) = Sampler(VOCAB, "cpu").sample(torch.zeros(1, VOCAB), [row])
    assert out.token_id == -1
    assert out.error is not None


def test_a_whole_vocabulary_is_reached() -> None:
    vocab = 152_000
    rows = [request(seed=index) for index in range(64)]
    tokens = sample(torch.zeros(64, vocab), rows)
    assert max(tokens) > 0.9 * vocab
    assert min(tokens) < 0.1 * vocab
    assert len(set(tokens)) == 64


def test_tokens_are_those_of_their_step_although_the_next_one_writes_to_its_buffer() -> None:
    buffer = torch.tensor([3, 4], dtype=torch.int32)
    tokens = AsyncTokens(buffer, (), [])
    buffer.fill_(9)
    assert [token.token_id for token in tokens.read()] == [3, 4]
