"""Random problems against the oracle on a GPU, `--problems` of them in all, by TRITON and, of drawn layers, by the
libraries that serve them.

Layers are those of a table, and drawn ones by the generator of `pagedattn bench random`. Of each, many lengths are
drawn: a kernel takes seconds to compile. `--problem KIND:SEED/INDEX` draws one again.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from backends.drawn_kinds import MOST, PREFIX, case_drawn, lengths_drawn, names
from backends.triton_kinds import KINDS, QUANTISED, case_of_kind

from pagedattn.backends.registry import get_backend
from pagedattn.errors import describe_error
from pagedattn.kernels import hopper
from pagedattn.ops.attention_plan import DECODE_TOKENS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
PER_TEST = 50  # problems at most
FIXED = (*KINDS, *QUANTISED)
PEERS = ("FLASH_ATTN", "FLASHINFER")
SHAPES = ("decodes", "prompts", "few", "mixed")
QUERIES = (0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 260)
CONTEXTS = (-5, 0, 0, 1, 15, 16, 17, 113, 127, 128, 129, 900, 3000)  # keys before the new tokens
KEYS = (1, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 2000, 6000)


class Share(NamedTuple):
    """Problems of one kind that a test draws, each by SEED/INDEX."""

    kind: str
    seed: int
    indices: range


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of one kind in a row, so that a worker that runs some of them compiles little."""
    if "share" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    tests = [named(text) for text in option("--problem")]
    tests = tests or part_of(shares(option("--problems"), option("--random-seed")), option("--random-part"))
    metafunc.parametrize("share", tests, ids=[f"{one.kind}-{one.seed}/{one.indices.start}" for one in tests])


def named(text: str) -> Share:
    """One problem, KIND:SEED/INDEX, as a failure says it."""
    kind, _, key = text.rpartition(":")
    seed, _, index = key.partition("/")
    if not (kind in FIXED or kind.startswith(PREFIX)) or not (seed.isdecimal() and index.isdecimal()):
        expected = "KIND:SEED/INDEX as a failure says it, such as 'drawn 0/17:0/1234'"
        raise pytest.UsageError(f"--problem must be {expected}, got {text!r}")
    return Share(kind, int(seed), range(int(index), int(index) + 1))


def shares(total: int, seed: int = 0) -> list[Share]:
    """Problems 0..total, cut in ranges that differ by one in length at most, as many for each kind: those of a table,
    and drawn ones, a layer for each `PER_TEST` problems."""
    every = [*FIXED, *names(min(max(total // PER_TEST, 1), MOST), seed)]
    kinds = [kind for kind in every for _ in range(-(-total // (len(every) * PER_TEST)))]
    n = len(kinds)
    return [Share(kind, seed, range(total * i // n, total * (i + 1) // n)) for i, kind in enumerate(kinds)]


def part_of(every: list[Share], text: str) -> list[Share]:
    """Part I of N equal ones, I/N from 1/N to N/N, for machines that are lent for less time than all take; in a row,
    so that few kinds are compiled in two of them."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--random-part must be I/N, from 1/N to N/N, such as 2/4, got {text!r}")
    begin, end = (len(every) * number // int(parts) for number in (int(part) - 1, int(part)))
    return every[begin:end]


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


def case_of(kind: str, index: int, seed: int = 0) -> Case:
    """A problem of a kind, with a new token to write: `check` wants to see one."""
    draw, drawn = random.Random(f"{seed}/{index}"), kind.startswith(PREFIX)
    traffic = drawn and draw.random() < 0.5

    def some() -> tuple[list[int], list[int]]:
        return lengths_drawn(draw) if traffic else lengths(SHAPES[index % len(SHAPES)], draw)

    queries, keys = some()
    while not any(map(min, queries, keys)):
        queries, keys = some()
    case = case_drawn(kind) if drawn else case_of_kind(kind)
    case = case.but(query_lens=tuple(queries), seq_lens=tuple(keys))
    share = not case.poison_behind and draw.random() < 0.3
    return case.but(fused_qkv=draw.random() < 0.3, padding_rows=draw.choice((0, 0, 3)), share_blocks=share)


def serving(kind: str, case: Case) -> list[str]:
    """TRITON, whatever the case; of drawn layers also the libraries that are here and serve such a one."""
    others = PEERS if kind.startswith(PREFIX) else ()
    spec = case.but(clean_cache=True).spec(DEVICE)
    return ["TRITON", *(n for n in others if get_backend(n).availability().ok and not get_backend(n).rejections(spec))]


def test_random_problems(share: Share, record_property: Any) -> None:
    kind, seed, indices = share
    kernels, counts, left_out = "", Counter[str](), dict[str, str]()
    for index in indices:
        case = case_of(kind, index, seed)
        told = f"{kind}:{seed}/{index}: queries {case.query_lens}, keys {case.seq_lens}"
        for name in serving(kind, case):
            backend = get_backend(name)
            problem = make_problem(case if name == "TRITON" else case.but(clean_cache=True), DEVICE, index)
            try:
                if name not in left_out:
                    kernels += backend.builder(problem.spec, DEVICE).build(problem.common).describe()
                    check(backend, problem, f"{name}, {told}")
                    counts[name] += 1
            except Exception as error:
                if name == "TRITON" or isinstance(error, AssertionError):
                    record_property("failed", f"{name}, {kind}:{seed}/{index}")
                    raise
                left_out[name] = describe_error(error)  # a kernel that this build of the library lacks
    record_property("problems", len(indices))
    for name in PEERS:
        record_property(f"problems {name}", counts[name])
    for name, why in left_out.items():
        record_property("left out", f"{name}, {kind}: {why}")
    if len(indices) >= len(SHAPES) and kind in FIXED:
        # Over quantised caches it depends on a prompt's length; the portable decode kernel may serve prompts too.
        prompts = "prefill kernel" if kind in QUANTISED else ""
        if kind in KINDS:
            prompts = "the portable one" if hopper.why_not_here(DEVICE) else "for Hopper"
        assert "decode kernel" in kernels and prompts in kernels, "a kernel that no problem ran"
