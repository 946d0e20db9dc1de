"""Gluon: an item's outputs and LSE, written by the program that has all of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import LN2, LOG2E, merge_factors
from .operands import is_4_bit
from .queries import inside, rows_of
from .rotation import rotate_back
from .split_kv import publish_and_reduce


@gluon.jit
def _finish(
    acc, m_i, l_i, out, prior, lse_out, q_start, q_len, q_block, kv_head, out_scale, so_t, so_h, sl_t,
    HEAD_DIM_V: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr,
    ROTATED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Write the output and LSE of an item's rows; ACCUMULATE: with the states that are there taken up."""
    R: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    q_row, head, exists = rows_of(gl.arange(0, R, ROWS), q_len, q_block, kv_head, GROUP, BLOCK_Q)
    token = (q_start + q_row).to(gl.int64)
    dim = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))
    acc = acc * gl.expand_dims(out_scale / gl.where(l_i == 0, 1.0, l_i), 1)
    if ROTATED:
        acc = rotate_back(acc, HEAD_DIM_V)
    to = out + gl.expand_dims(token * so_t + head * so_h, 1) + gl.expand_dims(dim, 0)
    stored = inside(gl.expand_dims(exists, 1), gl.expand_dims(dim, 0), HEAD_DIM_V, DV)
    if ACCUMULATE:
        there = gl.load(lse_out + token * sl_t + head, mask=exists, other=-float("inf")) * LOG2E
        mine = gl.where(l_i == 0, -float("inf"), m_i + gl.log2(l_i))
        m_i, there, mine = merge_factors(there, mine)
        l_i = there + mine
        of_there = to
        if prior is not None:
            of_there = (
                prior + gl.expand_dims(token * (KV_HEADS * GROUP) + head, 1) * HEAD_DIM_V + gl.expand_dims(dim, 0)
            )
        before = gl.load(of_there, mask=stored, other=0.0).to(gl.float32)
        total = gl.where(l_i == 0, 1.0, l_i)
        acc = acc * gl.expand_dims(mine / total, 1) + before * gl.expand_dims(there / total, 1)
    gl.store(to, acc.to(out.dtype.element_ty), mask=stored)
    if lse_out is not None:
        lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
        gl.store(lse_out + token * sl_t + head, lse, mask=exists)


@gluon.jit
def write_item(
    acc, m_i, l_i, out, prior, lse_out, workspace, kv_head, program, q_start, q_len, q_block, begins, ends, first, last,
    out_scale, so_t, so_h, sl_t, HEAD_DIM_V: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, V_CODES: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Write an item of which this program has the state [R, DV], [R] and [R]: all of it if it `begins` and `ends` here,
    else what programs first..last have together, where this one is the last of them."""
    complete = begins & ends
    if not complete:
        complete, acc, m_i, l_i = publish_and_reduce(
            acc, m_i, l_i, workspace, kv_head, program, begins, first, last, KV_HEADS, GROUP * BLOCK_Q
        )
    if complete:
        _finish(
            acc, m_i, l_i, out, prior, lse_out, q_start, q_len, q_block, kv_head, out_scale, so_t, so_h, sl_t,
            HEAD_DIM_V, KV_HEADS, GROUP, BLOCK_Q, is_4_bit(V_CODES), ACCUMULATE,
        )  # fmt: skip
