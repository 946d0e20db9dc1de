"""FlashAttention 3 over fp8 caches against the oracle: long prompts, pages that TMA loads, and many splits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from backends.peers import FA3_FP8

from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENS: dict[str, dict[str, Any]] = {
    "prompts": {"query_lens": (1500, 3, 700), "seq_lens": (1500, 40, 2200)},
    "decodes": {"query_lens": (1,) * 5, "seq_lens": (1, 130, 5000, 0, 777), "write": False},
    "mixed": {"query_lens": (1, 1, 300, 0), "seq_lens": (3000, 65, 1000, 64)},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"kv_scale": "head"},
    "window": {"kv_scale": "tensor", "sliding_window": 200},
    "soft cap": {"kv_scale": "float", "softcap": 20.0},
    "one KV head": {"kv_scale": "none", "heads": (8, 1)},
    "HND": {"kv_scale": "head", "layout": "HND", "heads": (4, 4)},
    "bidirectional": {"kv_scale": "head", "causal": False},
    "small queries": {"kv_scale": "float", "magnitude": 0.01},
    "float16": {"kv_scale": "float", "dtype": torch.float16},
}


@pytest.mark.parametrize("size", [16, 128, 256])
@pytest.mark.parametrize(("lens", "kind"), [*product(LENS, KINDS)])
def test_conforms(lens: str, kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", FA3_FP8.version)
    given: dict[str, Any] = {"heads": (8, 2), "dtype": torch.bfloat16, **KINDS[kind], **LENS[lens], "block_size": size}
    case = FA3_FP8.case(Case(kv_cache_dtype=FA3_FP8.kv_cache_dtype, **given))
    backend, device = FA3_FP8.load(), torch.device("cuda")
    if not backend.availability().ok:
        pytest.skip("FlashAttention 3 is not installed")
    assert backend.rejections(case.spec(device)) == []
    check(backend, make_problem(case, device), f"{kind}, {lens}, blocks of {size}")
