"""Products of 16-bit queries with keys and queries that have a second operand are as exact as float32's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pagedattn.kernels.products import products, rotated_queries

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false


@triton.jit
def _turned(q, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return q * 1.37


@triton.jit
def _products_kernel(query, key, out, ROTATE: tl.constexpr, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    q, k = tl.load(query + row * N + column), tl.load(key + row * N + column)
    q_rest = q
    if ROTATE is not None:
        q, q_rest = rotated_queries(q, ROTATE, N, N)
    tl.store(out + row * N + column, products(q, q_rest, k, ROTATE is not None, "tf32"))


@pytest.mark.parametrize(("rotate", "factor", "key_dtype"), [(_turned, 1.37, torch.float16), (None, 1, torch.float32)])
def test_what_16_bits_round_off_is_multiplied_too(
    device: str, rotate: Any, factor: float, key_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(32, 32, dtype=torch.float16), torch.randn(32, 32).to(key_dtype)
    out = torch.empty(32, 32, device=device)
    _products_kernel[(1,)](query.to(device), key.to(device), out, rotate, 32)
    want = (query.double() * factor) @ key.double().T
    assert (out.cpu() - want).abs().max() < 2e-5  # 16 bits alone are off by 6e-3
