"""Random problems of TRITON against the oracle on a GPU: both kernels of a layer, `--problems` of them in all.

Lengths are drawn, not what decides which kernels are compiled: a kernel takes seconds to compile.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from backends.triton_kinds import KINDS, PORTABLE, QUANTISED, case_of_kind

from pagedattn.backends.registry import get_backend
from pagedattn.kernels import hopper
from pagedattn.ops.attention_plan import DECODE_TOKENS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
PER_TEST = 50  # problems at most
SHAPES = ("decodes", "prompts", "few", "mixed")
QUERIES = (0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 260)
CONTEXTS = (-5, 0, 0, 1, 15, 16, 17, 113, 127, 128, 129, 900, 3000)  # keys before the new tokens
KEYS = (1, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 2000, 6000)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of one kind in a row, so that a worker that runs some of them compiles little."""
    if "seeds" not in metafunc.fixturenames:
        return
    tests = shares(metafunc.config.getoption("--problems"))
    metafunc.parametrize(("kind", "seeds"), tests, ids=[f"{kind}-{seeds.start}" for kind, seeds in tests])


def shares(total: int) -> list[tuple[str, range]]:
    """Seeds 0..total, cut in ranges that differ by one in length at most, as many for each kind."""
    every = [*KINDS, *QUANTISED, *PORTABLE]
    kinds = [kind for kind in every for _ in range(-(-total // (len(every) * PER_TEST)))]
    return [(kind, range(total * i // len(kinds), total * (i + 1) // len(kinds))) for i, kind in enumerate(kinds)]


def lengths(shape: str, draw: random.Random) -> tuple[list[int], list[int]]:
    """Query and key lengths of a step of decodes, of few tokens each, of prompts in any order, or of both.

    Few distinct longest ones of those that the decode kernel serves: each power of two is another kernel.
    """
    if shape == "decodes":
        many = draw.random() < 0.05  # so many that a GPU is full
        queries = [draw.choice((1, 1, 1, 1, 0)) for _ in range(110 if many else draw.randint(1, 9))]
        return queries, [draw.choice(KEYS[:-3] if many else (0, *KEYS)) for _ in queries]
    if shape == "few":
        longest = draw.choice((4, DECODE_TOKENS))
        queries = [*(draw.randint(0, longest) for _ in range(draw.randint(0, 8))), longest]
        draw.shuffle(queries)
    else:
        queries = [draw.choice(QUERIES) for _ in range(draw.randint(0, 3))] + [draw.choice(QUERIES[5:])]
        draw.shuffle(queries)
    keys = [max(n + draw.choice(CONTEXTS), 0) for n in queries]
    decodes = draw.randint(1, 6) if shape == "mixed" else 0
    return [1] * decodes + queries, [draw.choice(KEYS) for _ in range(decodes)] + keys


def case_of(kind: str, seed: int) -> Case:
    """A problem of a kind, with a new token to write: `check` wants to see one."""
    shape, draw = SHAPES[seed % len(SHAPES)], random.Random(seed)
    queries, keys = lengths(shape, draw)
    while not any(map(min, queries, keys)):
        queries, keys = lengths(shape, draw)
    case = case_of_kind(kind).but(query_lens=tuple(queries), seq_lens=tuple(keys))
    share = not case.poison_behind and draw.random() < 0.3
    return case.but(fused_qkv=draw.random() < 0.3, padding_rows=draw.choice((0, 0, 3)), share_blocks=share)


def test_random_problems(kind: str, seeds: range, record_property: Any) -> None:
    backend, kernels = get_backend("TRITON"), ""
    for seed in seeds:
        case = case_of(kind, seed)
        problem = make_problem(case, DEVICE, seed)
        kernels += backend.builder(problem.spec, DEVICE).build(problem.common).describe()
        check(backend, problem, f"{kind}, seed {seed}: queries {case.query_lens}, keys {case.seq_lens}")
    record_property("problems", len(seeds))
    if len(seeds) >= len(SHAPES):
        # Over quantised caches it depends on a prompt's length; the portable decode kernel may serve prompts too.
        prompts = "prefill kernel" if kind in QUANTISED else ""
        if kind in KINDS:
            prompts = "the portable one" if hopper.why_not_here(DEVICE) else "for Hopper"
        assert "decode kernel" in kernels and prompts in kernels, "a kernel that no problem ran"
