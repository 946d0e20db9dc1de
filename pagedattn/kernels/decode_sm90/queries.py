"""Gluon: the queries of an item, as the second operand of products with codes.

Codes are multiplied as float16, so that queries must be in its range: a power of two for each row brings its largest
element to where float16 has it, just below its largest number, or of keys in steps of their channels below 4, so that
products with the largest step (8,704) stay in range. With elements that are stored as they are, queries are too.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import bits, powers_of_two
from .axes import along, in_3d
from .operands import is_4_bit, is_turboquant, key_element
from .operands_4bit import in_key_order
from .rotation import rotate
from .spread_codes import in_spread_order


@gluon.jit
def rows_of(row, q_len, q_block, kv_head, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Query token in the sequence, query head, and whether there is one, of an item's rows."""
    q_row = q_block * BLOCK_Q + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (q_row < q_len)
    return q_row, (kv_head * GROUP + row % GROUP).to(gl.int64), exists


@gluon.constexpr_function
def used_rows(rows, group, one_token):
    """A power of two of `rows` that has all that are not padding: of one token the heads of a group."""
    return triton.next_power_of_2(group) if one_token else rows


@gluon.jit
def load_rows(
    query, sq_t, sq_h, q_start, q_len, q_block, kv_head, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    HEAD_DIM: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """An item's first COUNT rows, float32 [COUNT, D] in LAYOUT, zeros where there are none and from HEAD_DIM on."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    q_row, head, exists = rows_of(gl.arange(0, COUNT, ROWS), q_len, q_block, kv_head, GROUP, BLOCK_Q)
    row = query + gl.expand_dims((q_start + q_row).to(gl.int64) * sq_t + head * sq_h, 1)
    dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    there = inside(gl.expand_dims(exists, 1), dim, HEAD_DIM, D)
    return gl.load(row + dim, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def load_queries(
    query, sq_t, sq_h, q_start, q_len, q_block, kv_head, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    HEAD_DIM: gl.constexpr, R: gl.constexpr, USED: gl.constexpr, W: gl.constexpr, K_CODES: gl.constexpr,
    QUERY: gl.constexpr,
):  # fmt: skip
    """An item's rows, all of them among the first USED of R, vectors along QUERY's last axis: the operand [W, D, R], 0
    from HEAD_DIM on, in the order of the keys' codes, the same for each warp, of rotated ones what that rounds off, and
    what their products are yet to be multiplied by, float32 [W, R]. `QUERY`: the layout of the operand."""
    if is_4_bit(K_CODES):
        MINE: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [W, 1], [1, 0])
        x = load_rows(query, sq_t, sq_h, q_start, q_len, q_block, kv_head, GROUP, BLOCK_Q, D, HEAD_DIM, USED, MINE)
        EXPONENT: gl.constexpr = 1 if K_CODES == "int4_per_channel" else 14
        q, rest, up = in_range(x, is_turboquant(K_CODES), EXPONENT, HEAD_DIM)
        q, rest = in_spread_order(q, K_CODES), in_spread_order(rest, K_CODES)
        q, rest = _for_each_warp(_repeated(q, R), W, QUERY), _for_each_warp(_repeated(rest, R), W, QUERY)
        up = gl.expand_dims(gl.convert_layout(_repeated(up, R), along(2, QUERY)), 0)
        up += gl.zeros([W, R], gl.float32, gl.SliceLayout(1, QUERY))
    else:
        q_row, head, exists = rows_of(gl.arange(0, R, along(2, QUERY)), q_len, q_block, kv_head, GROUP, BLOCK_Q)
        row = query + in_3d((q_start + q_row).to(gl.int64) * sq_t + head * sq_h, 2)
        element = in_3d(key_element(gl.arange(0, D, along(1, QUERY)), K_CODES), 1)
        mine = gl.arange(0, W, along(0, QUERY)) * 0
        there = inside(in_3d(exists, 2), element, HEAD_DIM, D)
        q = gl.load(row + in_3d(mine, 0) + element, mask=there, other=0.0)
        up = gl.full([W, R], 1.0, gl.float32, gl.SliceLayout(1, QUERY))
        if K_CODES != "native":
            down, up = powers_of_two(gl.max(gl.abs(q.to(gl.float32)), 1), 14, 15)
            q = (q.to(gl.float32) * gl.expand_dims(down, 1)).to(gl.float16)
        rest = q
    return q, rest, up


@gluon.jit
def inside(exists, dim, HEAD_DIM: gl.constexpr, D: gl.constexpr):
    """Which elements of rows there are: those of the rows that `exist`, without what is beyond HEAD_DIM of D."""
    if HEAD_DIM < D:
        exists = exists & (dim < HEAD_DIM)
    return exists


@gluon.jit
def _repeated(x, ROWS: gl.constexpr):
    """Rows again and again until they are ROWS; outputs of the repeated ones are not used."""
    for _i in gl.static_range(bits(ROWS // x.shape[0])):
        both = gl.join(x, x)
        if len(x.shape) == 2:
            x = both.permute((2, 0, 1)).reshape([2 * x.shape[0], x.shape[1]])
        else:
            x = both.permute((1, 0)).reshape([2 * x.shape[0]])
    return x


@gluon.jit
def first_of(x, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """The first COUNT of a vector's elements, in a layout."""
    x = gl.convert_layout(x, gl.BlockedLayout([x.shape[0]], [32], [gl.num_warps()], [0]))
    for _i in gl.static_range(bits(x.shape[0] // COUNT)):
        x, _rest = gl.split(x.reshape([2, x.shape[0] // 2]).permute((1, 0)))
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def in_range(x, ROTATED: gl.constexpr, EXPONENT: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Rows [R, D] of float32, rotated where keys are, times a power of two each that brings the largest element to
    2**EXPONENT or up to twice that: as float16, what that rounds off them, and the inverses of the powers [R]."""
    if ROTATED:
        x = rotate(x, HEAD_DIM)
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
