"""Random problems: every backend against the oracle, and every two backends against each other, on a GPU."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
import torch
from backends.peers import DTYPES, FA2, FA3, FLASHINFER, TORCH, TRITON, Peer

from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_close, assert_lse_close
from pagedattn.testing.conformance import lse_gates
from pagedattn.testing.problem import Problem, make_problem

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
EVERYONE = (FA2, FA3, FLASHINFER, TRITON, TORCH)
WITHOUT_FA2 = (FA3, FLASHINFER, TRITON, TORCH)
PER_TEST = 50
GATES = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # twice that of one backend against the oracle


def random_shape(rng: random.Random, block_size: int) -> Case:
    """What decides which kernels are compiled; shared by the problems of a test, since compiling takes longest."""
    dtype = rng.choice(DTYPES)
    feature = rng.choice(("plain", "plain", "window", "softcap")) if dtype == torch.bfloat16 else "plain"
    group = 1 if feature == "window" and block_size == 256 else rng.choice((1, 4, 5, 7, 8))
    return Case(
        heads=(2 * group, 2),
        head_dim=128,
        block_size=block_size,
        dtype=dtype,
        clean_cache=True,
        sliding_window=rng.choice((15, 16, 17, 255, 256)) if feature == "window" else None,
        softcap=rng.choice((5.0, 30.0)) if feature == "softcap" else None,
        lse=rng.random() < 0.5,
    )


def random_case(rng: random.Random, shape: Case) -> Case:
    """Something all of the backends serve: shuffled and shared blocks, garbage tails, padding, empty rows, lengths
    around the block size."""
    batch = rng.choice((1, 1, 2, 3, 5, 9))
    decode = rng.random() < 0.4
    query_lens = [1 if decode else rng.choice((0, 1, 1, 2, 3, 15, 16, 17, 40, 65)) for _ in range(batch)]
    query_lens.sort(key=lambda n: n != 1)  # decodes first, as a scheduler sorts them
    around = (1, 2, 15, 16, 17, 63, 255, 256, 257, 300, 511, 513, 700)
    return shape.but(
        query_lens=tuple(query_lens),
        seq_lens=tuple(max(n, rng.choice(around)) if n else 0 for n in query_lens),
        share_blocks=rng.random() < 0.3,
        padding_rows=rng.choice((0, 0, 0, 3)),
        fused_qkv=rng.random() < 0.3,
    )


def outputs(peer: Peer, problem: Problem, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    """Checked against the oracle: output rows and, where asked for, LSE."""
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    backend, case, rows = peer.load(), problem.case, sum(problem.case.query_lens)
    reasons = backend.rejections(problem.spec)
    assert not reasons, f"{name} must be served: {'; '.join(map(str, reasons))}"
    out, lse = problem.run(backend)
    assert_close(name, out[:rows], problem.expected, problem.naive, softcap=case.softcap is not None)
    if lse is None:
        assert not case.lse
        return (out[:rows],)
    gates = lse_gates(backend.capabilities(), case)
    assert_lse_close(name, lse[:rows], problem.expected_lse, case.dtype, **gates)
    return out[:rows], lse[:rows]


def agree(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], gate: float) -> None:
    difference = (one[0].double() - other[0].double()).norm()
    assert difference <= gate * one[0].double().norm() + 1e-6
    if len(one) > 1:
        torch.testing.assert_close(one[1], other[1], atol=gate, rtol=1e-4)


@pytest.mark.parametrize("chunk", range(60))
def test_every_pair(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(chunk, EVERYONE, 256, monkeypatch)


@pytest.mark.parametrize("chunk", range(60, 80))
def test_pairs_on_small_blocks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(chunk, WITHOUT_FA2, (1, 16, 16, 64)[chunk % 4], monkeypatch)


def compare(chunk: int, peers: tuple[Peer, ...], block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [peer.name for peer in peers if not peer.load().availability().ok]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    compared: Counter[tuple[str, str]] = Counter()
    shape = random_shape(random.Random(chunk % 20), block_size)
    for index in range(PER_TEST):
        seed = chunk * PER_TEST + index
        case = random_case(random.Random(seed), shape)
        problem = make_problem(case, torch.device("cuda"), seed)
        results = {peer.name: outputs(peer, problem, f"{peer.name} {seed} {case}", monkeypatch) for peer in peers}
        for one, other in combinations(results, 2):
            agree(results[one], results[other], GATES[case.dtype])
            compared[one, other] += 1
    assert len(compared) == len(peers) * (len(peers) - 1) // 2 and set(compared.values()) == {PER_TEST}
