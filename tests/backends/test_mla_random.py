"""Random problems over latent rows, of every backend that serves them, against the oracle.

Lengths are drawn, not what decides which kernels are compiled: a kernel takes seconds to compile.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from pagedattn.backends.registry import get_backend
from pagedattn.testing import Case, check, interpreted, make_problem

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PROBLEMS = 60 if GPU else 6
# (heads, latent, rope, block size, dtype): parts of several heads, odd rows, those of the models.
KINDS = {
    "one part": (5, 32, 8, 16, torch.float32),
    "two parts": (96, 16, 16, 4, torch.float16),
    "odd rows": (3, 24, 5, 3, torch.float32),
    "models": (16, 512, 64, 64, torch.bfloat16 if GPU else torch.float16),
}
# Only some rows of fp8 are served where kernels are compiled: TRITON's rejections say so.
MULTIPLE_OF_CODES = 1 if interpreted() else 16
QUERIES = (0, 1, 1, 1, 2, 3, 15, 16, 17)
CONTEXTS = (0, 0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 150, *((900, 3000) if GPU else ()))


def random_case(kind: str, draw: random.Random) -> Case:
    heads, latent, rope, size, dtype = KINDS[kind]
    few = kind in ("two parts", "models") and not GPU  # whose rows are slow to interpret
    queries = [draw.choice(QUERIES[:6] if few else QUERIES) for _ in range(draw.randint(1, 3 if few else 7))] + [1]
    keys = [n + draw.choice(CONTEXTS[:9] if few else CONTEXTS) for n in queries]
    scale = draw.choice(("none", "float", "tensor"))
    formats: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": scale}]
    if kind == "models":
        formats.append({"kv_cache_dtype": "fp8_ds_mla"})
    stored = draw.choice(formats)
    if stored:
        latent, rope = (-(-part // MULTIPLE_OF_CODES) * MULTIPLE_OF_CODES for part in (latent, rope))
    return Case(
        heads=(heads, 1),
        head_dim=latent + rope,
        latent_dim=latent,
        block_size=size,
        dtype=dtype,
        scale=0.15,
        query_lens=tuple(queries),
        seq_lens=tuple(keys),
        layout=draw.choice(("NHD", "HND")),
        padding_rows=draw.choice((0, 0, 3)),
        share_blocks=draw.random() < 0.3,
        sliding_window=draw.choice((None, None, 7, 40)),
        softcap=draw.choice((None, None, 4.0)),
        **stored,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["TRITON", "TORCH"])
def test_random_problems(backend: str, kind: str) -> None:
    if backend == "TRITON" and not (GPU or interpreted()):
        pytest.skip("TRITON serves the CPU only when interpreted")
    # Sums of float32 are in another order on a GPU, where the gates' naive implementation may be right by chance.
    device = torch.device("cpu") if backend == "TORCH" else DEVICE
    drawn: Counter[str] = Counter()
    for seed in range(PROBLEMS):
        case = random_case(kind, random.Random(seed))
        problem = make_problem(case, device, seed)
        assert not get_backend(backend).rejections(problem.spec)
        check(get_backend(backend), problem, f"{backend}, {kind}, seed {seed}: {case.query_lens}, {case.seq_lens}")
        drawn["several tokens"] += max(case.query_lens) > 1
        drawn["padding"] += case.padding_rows > 0
        drawn["features"] += bool(case.sliding_window or case.softcap)
        drawn[case.kv_cache_dtype] += 1
    formats = ("auto", "fp8_e4m3", *(["fp8_ds_mla"] if kind == "models" else []))
    assert all(drawn[name] for name in ("several tokens", "padding", "features", *formats))
