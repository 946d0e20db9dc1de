"""Random problems of TRITON against the oracle on a GPU: both kernels of a layer, `--problems` of them in all.

What decides which kernels are compiled is literal here, lengths are drawn: a kernel takes seconds to compile.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagedattn.backends.registry import get_backend
from pagedattn.ops import hopper
from pagedattn.ops.launch import DECODE_TOKENS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
PER_TEST = 50  # problems at most
FP16 = torch.float16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain without LSE": {"lse": False},
    "fp16, D64": {"dtype": FP16, "head_dim": 64},
    "D256, blocks of 32": {"head_dim": 256, "block_size": 32},
    "D256, fp16, group of 8": {"head_dim": 256, "dtype": FP16, "heads": (8, 1)},
    "blocks of 64, group of 5": {"block_size": 64, "heads": (10, 2)},
    "blocks of 128, soft cap": {"block_size": 128, "softcap": 30.0},
    "blocks of 256, no LSE": {"block_size": 256, "lse": False},
    "HND, fp16": {"layout": "HND", "dtype": FP16},
    "HND, blocks of 32, one KV head": {"layout": "HND", "block_size": 32, "heads": (8, 1)},
    "one head": {"heads": (1, 1)},
    "a KV head per head": {"heads": (4, 4), "lse": False},
    "group of 6, sinks": {"heads": (12, 2), "sinks": 1.0},
    "group of 7, D64": {"heads": (14, 2), "head_dim": 64},
    "group of 64": {"heads": (64, 1)},
    "sinks and soft cap, fp16": {"sinks": 0.5, "softcap": 5.0, "dtype": FP16},
    "window of 1": {"sliding_window": 1},
    "window of 16, released, HND": {"sliding_window": 16, "poison_behind": True, "layout": "HND"},
    "window of 17, D64": {"sliding_window": 17, "head_dim": 64, "lse": False},
    "window of 129, released": {"sliding_window": 129, "poison_behind": True},
    "window of 1000, sinks, blocks of 64": {"sliding_window": 1000, "sinks": 1.0, "block_size": 64},
    "window, soft cap, sinks, fp16": {"sliding_window": 128, "softcap": 30.0, "sinks": 0.0, "dtype": FP16},
    "bidirectional": {"causal": False},
    "bidirectional window, fp16": {"causal": False, "sliding_window": 50, "dtype": FP16},
    "bidirectional, soft cap, D256": {"causal": False, "softcap": 5.0, "head_dim": 256},
}
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
    kinds = [kind for kind in KINDS for _ in range(-(-total // (len(KINDS) * PER_TEST)))]
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
    changes = {"head_dim": 128, "heads": (8, 2), "dtype": torch.bfloat16, **KINDS[kind]}
    drawn = {"fused_qkv": draw.random() < 0.3, "padding_rows": draw.choice((0, 0, 3)), "share_blocks": False}
    drawn["share_blocks"] = not changes.get("poison_behind") and draw.random() < 0.3
    return Case(query_lens=tuple(queries), seq_lens=tuple(keys), **changes, **drawn)


def test_random_problems(kind: str, seeds: range, record_property: Any) -> None:
    backend, kernels = get_backend("TRITON"), ""
    for seed in seeds:
        case = case_of(kind, seed)
        problem = make_problem(case, DEVICE, seed)
        kernels += backend.builder(problem.spec, DEVICE).build(problem.common).describe()
        check(backend, problem, f"{kind}, seed {seed}: queries {case.query_lens}, keys {case.seq_lens}")
    record_property("problems", len(seeds))
    prompts = "the portable one" if hopper.why_not_here(DEVICE) else "for Hopper"
    if len(seeds) >= len(SHAPES):
        assert "decode kernel" in kernels and prompts in kernels, "a kernel that no problem ran"
