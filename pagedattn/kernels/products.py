"""Products of queries and keys in 16 bits, as exact as what is stored, as device code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_queries(q, ROTATE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D], rotated, and what its dtype rounds off: in 16 bits alone a rotated query has logits wrong by
    more than products round them."""
    return _two_operands(ROTATE(q.to(tl.float32), D, BLOCK_D), q.dtype)


@triton.jit
def products(q, q_rest, k, ROTATED: tl.constexpr, PRECISION: tl.constexpr):
    """q [M, D] times k [N, D], float32 [M, N]. Of ROTATED queries, q_rest too; keys that a format loads in float32 have
    a second operand likewise."""
    if k.dtype == tl.float32 and q.dtype != tl.float32:
        k, k_rest = _two_operands(k, q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.dot(q, tl.trans(k_rest), s, input_precision=PRECISION)
    else:
        k = tl.trans(k.to(q.dtype))
        s = tl.dot(q, k, input_precision=PRECISION)
        if ROTATED and q.dtype != tl.float32:
            s = tl.dot(q_rest, k, s, input_precision=PRECISION)
    return s


@triton.jit
def _two_operands(wide, DTYPE: tl.constexpr):
    """A tile of float32 as one of DTYPE and what that rounds off."""
    rounded = wide.to(DTYPE)
    return rounded, (wide - rounded.to(tl.float32)).to(DTYPE)
