"""Prompts of few tokens on long contexts by TRITON without the kernel for Hopper: the decode kernel shares keys out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covers import values

pytest.importorskip("triton")
from pagedattn.backends.registry import get_backend
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ALiBi, soft cap, sinks": {"alibi": True, "softcap": 5.0, "sinks": 1.0},
    "a window": {"sliding_window": 2040},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
}


@pytest.mark.cover(by=values)
@pytest.mark.parametrize("lens", [((33,), (2100,)), ((1, 1, 20), (300, 2500, 2048))], ids=["prompt", "mixed"])
@pytest.mark.parametrize("features", FEATURES)
def test_against_the_oracle(features: str, lens: tuple[tuple[int, ...], ...]) -> None:
    shape = {"head_dim": 68, "heads": (4, 2), "dtype": torch.float16, "query_lens": lens[0], "seq_lens": lens[1]}
    case = Case(**{**shape, **FEATURES[features]})  # type: ignore[arg-type]
    problem = make_problem(case, DEVICE)
    planned = get_backend("TRITON").builder(problem.spec, DEVICE).build(problem.common).describe()
    assert "decode kernel" in planned and "prefill kernel" not in planned
    check(get_backend("TRITON"), problem, case.id)
