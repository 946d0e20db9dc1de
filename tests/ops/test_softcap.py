"""Logits far below their cap keep float32's digits: tanh of a small number is no difference of numbers near 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import ops

SMALL = [1e-30, 1e-9, 1e-6, 1e-3, -1e-3, 1.0, -30.0, 150.0, 199.0, 201.0, -250.0, 900.0, 1e4]


@pytest.mark.parametrize("cap", [1.0, 50.0, 1e3])
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("torch", {"path": "torch"}),
        ("decode kernel", {"path": "triton", "num_decodes": len(SMALL)}),
        ("prefill kernel", {"path": "triton", "deterministic": True}),
    ],
)
def test_a_capped_logit_to_the_last_digits(device, way: str, options: dict[str, Any], cap: float) -> None:
    """One key each: its logit is the LSE."""
    count = len(SMALL)
    query, keys = torch.zeros(count, 1, 16), torch.zeros(count, 4, 1, 16)
    query[:, 0, 0] = torch.tensor(SMALL)
    keys[:, 0, 0, 0] = 1.0
    lse = torch.empty(count, 1, device=device)
    ops.paged_attention(
        query.to(device),
        keys.to(device),
        keys.to(device),
        torch.arange(count, dtype=torch.int32, device=device)[:, None],
        torch.arange(count + 1, dtype=torch.int32, device=device),
        torch.ones(count, dtype=torch.int32, device=device),
        max_query_len=1,
        max_seq_len=1,
        scale=1.0,
        softcap=cap,
        lse=lse,
        **options,
    )
    wanted = cap * torch.tanh(torch.tensor(SMALL).double() / cap)
    assert float(((lse[:, 0].cpu().double() - wanted) / wanted).abs().max()) < 1e-6
