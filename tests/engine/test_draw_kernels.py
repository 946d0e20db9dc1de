"""The kernels that draw tokens against the sampler's torch path, which is tested against plain references."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from pagedattn.engine import Request
from pagedattn.engine.sampling.kernels import draw as kernels
from pagedattn.engine.sampling.kernels.cutoff import cutoffs
from pagedattn.engine.sampling.packed_params import PARAMS, request_params
from pagedattn.engine.sampling.sampler import Sampler, _cutoff
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.testing import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not interpreted() and DEVICE == "cpu", reason="kernels need a GPU or the interpreter")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.4},
    {"top_p": 0.95, "temperature": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 9, "top_p": 0.99, "min_p": 0.05, "temperature": 1.5},
    {"top_k": 10**9},
]


def requests(count: int, kinds: list[dict[str, Any]] = KINDS) -> list[Request]:
    out = []
    for index in range(count):
        params = SamplingParams(**kinds[index % len(kinds)])
        tokens, seed = array("i", [1] * (1 + index)), (-1) ** index * (index << 33)
        out.append(Request("r", tokens, params, arrival=0, max_total_tokens=999, seed=seed))
    return out


def by_kernel(logits: torch.Tensor, rows: list[Request]) -> list[int]:
    """Each request's parameters lie in another row of the table than its logits."""
    count = len(rows)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(9))
    params = torch.zeros(count, PARAMS, dtype=torch.int32)
    params[order] = torch.from_numpy(request_params(rows))
    lengths = torch.tensor([len(request.token_ids) for request in rows], dtype=torch.int32)
    tokens = torch.full((count,), -7, dtype=torch.int32, device=DEVICE)
    kernels.draw(logits.to(DEVICE), *(x.to(DEVICE) for x in (params, order.int(), lengths)), tokens)
    return tokens.tolist()


def by_torch(logits: torch.Tensor, rows: list[Request]) -> list[int]:
    return [token.token_id for token in Sampler(logits.shape[1], "cpu").sample(logits, rows)]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(5, torch.float32), (300, torch.float16), (2100, torch.float32), (9000, torch.float32)]
)
def test_tokens_are_those_of_the_torch_path(vocab: int, dtype: torch.dtype) -> None:
    """9,000 tokens: some rows' cutoffs are among a few candidates, others are too flat for that."""
    count = 24
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)).mul(3).to(dtype)
    rows = requests(count)
    tokens = by_kernel(logits, rows)
    assert tokens == by_torch(logits, rows)
    assert len(set(tokens)) > (12 if vocab > 5 else 3)


@pytest.mark.parametrize("spread", [3.0, 0.05])
def test_cutoffs_are_those_of_the_torch_path(spread: float) -> None:
    """Of 9,000 scores a few candidates hold the cutoff; where the distribution is flat, more than there is room for."""
    count, vocab = 24, 9000
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(2)) * spread
    rows = requests(count)
    params, order = torch.from_numpy(request_params(rows)), torch.arange(count, dtype=torch.int32)
    found = cutoffs(*(x.to(DEVICE) for x in (logits, params, order))).cpu()
    for row, request in enumerate(rows):
        settings = request.sampling
        if settings.greedy:
            continue
        scores = logits[row : row + 1] * (1 / torch.tensor(settings.temperature))
        wanted = _cutoff(scores, params[row : row + 1])
        smallest = -torch.inf if wanted is None else float(wanted)
        kept = [int((scores >= one).sum()) for one in (found[row], smallest)]
        assert kept[0] == kept[1], settings


def test_tied_scores_are_kept_together() -> None:
    """Whole numbers tie at every cutoff; of equals the first wins a greedy row."""
    logits = torch.randn(24, 200, generator=torch.Generator().manual_seed(3)).mul(2).round()
    logits[:, 50] = 0.0
    logits[:, 51] = -0.0
    rows = requests(24)
    assert by_kernel(logits, rows) == by_torch(logits, rows)


def test_rows_without_a_finite_maximum_are_told_apart() -> None:
    logits = torch.zeros(8, 100)
    for row in range(0, 8, 2):
        logits[row, 7] = (float("nan"), float("inf"))[row // 2 % 2]
    logits[7] = -float("inf")
    for kinds in ([{"temperature": 0.0}], [{}], [{"top_k": 3}], [{"top_p": 0.5}], [{"min_p": 0.1}]):
        tokens = by_kernel(logits, requests(8, kinds))
        assert [token == -1 for token in tokens] == [row % 2 == 0 or row == 7 for row in range(8)], kinds


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((24, 300), -float("inf"))
    logits[:, 100:110] = 1.0
    assert all(100 <= token < 110 for token in by_kernel(logits, requests(24)))
