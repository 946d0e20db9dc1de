"""Gluon: the queries of an item, as the second operand of products with codes.

Codes are multiplied as float16, so that queries must be in its range: a power of two for each row brings its largest
element to where float16 has it, just below its largest number, or of keys in steps of their channels below 4, so that
products with the largest step (8,704) stay in range.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import powers_of_two
from .axes import along, in_3d
from .operands import is_4_bit, key_element
from .operands_4bit import in_key_order
from .rotation import rotate


@gluon.jit
def rows_of(row, q_len, q_block, kv_head, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Query token in the sequence, query head, and whether there is one, of an item's rows."""
    q_row = q_block * BLOCK_Q + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (q_row < q_len)
    return q_row, (kv_head * GROUP + row % GROUP).to(gl.int64), exists


@gluon.jit
def load_queries(
    query, row_at, exists, D: gl.constexpr, R: gl.constexpr, W: gl.constexpr, K_CODES: gl.constexpr, QUERY: gl.constexpr
):
    """The rows [R] that begin at `row_at`, of which there are those that `exists` says, vectors along QUERY's last
    axis: float16 [W, D, R] in the order of the keys' codes, the same for each warp, of rotated ones what that rounds
    off, and what their products are yet to be multiplied by, float32 [W, R]. `QUERY`: the layout of the operand."""
    if is_4_bit(K_CODES):
        q, rest, up = _rows_in_order(query, row_at, exists, D, R, W, K_CODES, QUERY)
    else:
        element = in_3d(key_element(gl.arange(0, D, along(1, QUERY))), 1)
        mine = gl.arange(0, W, along(0, QUERY)) * 0
        q = gl.load(query + in_3d(mine, 0) + in_3d(row_at, 2) + element, mask=in_3d(exists, 2), other=0.0)
        down, up = powers_of_two(gl.max(gl.abs(q.to(gl.float32)), 1), 14, 15)
        q = (q.to(gl.float32) * gl.expand_dims(down, 1)).to(gl.float16)
        rest = q
    return q, rest, up


@gluon.jit
def _rows_in_order(
    query, row_at, exists, D: gl.constexpr, R: gl.constexpr, W: gl.constexpr, K_CODES: gl.constexpr, QUERY: gl.constexpr
):
    """For codes of 4 bits, whose queries may have to be rotated: a thread has neighbouring elements of a row."""
    MINE: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [W, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, MINE)
    at, there = gl.convert_layout(row_at, ROWS), gl.convert_layout(exists, ROWS)
    dim = gl.arange(0, D, gl.SliceLayout(0, MINE))
    x = gl.load(query + gl.expand_dims(at, 1) + gl.expand_dims(dim, 0), mask=gl.expand_dims(there, 1), other=0.0)
    EXPONENT: gl.constexpr = 1 if K_CODES == "int4_per_channel" else 14
    q, rest, up = in_range(x.to(gl.float32), K_CODES == "turboquant4", EXPONENT)
    rest = _for_each_warp(rest, W, QUERY)
    up = gl.expand_dims(gl.convert_layout(up, along(2, QUERY)), 0)
    return _for_each_warp(q, W, QUERY), rest, up + gl.zeros([W, R], gl.float32, gl.SliceLayout(1, QUERY))


@gluon.jit
def in_range(x, ROTATED: gl.constexpr, EXPONENT: gl.constexpr):
    """Rows [R, D] of float32, rotated where keys are, times a power of two each that brings the largest element to
    2**EXPONENT or up to twice that: as float16, what that rounds off them, and the inverses of the powers [R]."""
    if ROTATED:
        x = rotate(x)
    down, up = powers_of_two(gl.max(gl.abs(x), 1), EXPONENT, EXPONENT + 1)
    x *= gl.expand_dims(down, 1)
    q = x.to(gl.float16)
    return q, (x - q.to(gl.float32)).to(gl.float16), up


@gluon.jit
def _for_each_warp(x, W: gl.constexpr, QUERY: gl.constexpr):
    """Rows [R, D] as an operand [W, D, R]."""
    x = gl.expand_dims(gl.convert_layout(in_key_order(x).permute((1, 0)), gl.SliceLayout(0, QUERY)), 0)
    every, _ = gl.broadcast(x, gl.zeros([W, x.shape[1], x.shape[2]], gl.float16, QUERY))
    return every
