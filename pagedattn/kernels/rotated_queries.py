"""Queries of formats that rotate keys, as device code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_queries(q, ROTATE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D], rotated, and what its dtype rounds off: in 16 bits alone a rotated query has logits wrong by
    more than products round them."""
    turned = ROTATE(q.to(tl.float32), D, BLOCK_D)
    rounded = turned.to(q.dtype)
    return rounded, (turned - rounded.to(tl.float32)).to(q.dtype)
