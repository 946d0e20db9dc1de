"""Gluon: what a program of a Hopper kernel for latent attention leaves of an item besides outputs: the LSE, or its
partial state's place, maximum and sum, and the note of which programs share the item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import LN2
from ..gluon_even_split import program_of
from .hopper_items import LATENT


@gluon.jit
def state_of(item, at, states, shape):
    """The place of an item's partial state. A program may end inside one item and start inside another: it has two."""
    place = 2 * gl.program_id(0) + gl.where(item.origin == at, 1, 0)
    return states + place.to(gl.int64) * (2 * shape.ROWS + shape.ROWS * LATENT)


@gluon.jit
def write_sums(m_i, l_i, item, part, whole, state, lse_out, sl_t, shape):
    """The LSE of an item that is `whole`, or a partial state's maximum and sum."""
    row = gl.arange(0, shape.ROWS, m_i.type.layout)
    q_row, head, exists = item.rows(row, part, shape)
    if whole:
        if lse_out is not None:
            lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
            gl.store(lse_out + (item.q_start + q_row).to(gl.int64) * sl_t + head, lse, mask=exists)
    else:
        if state is not None:
            gl.store(state + row, m_i.to(gl.int32, bitcast=True), mask=exists)
            gl.store(state + shape.ROWS + row, l_i.to(gl.int32, bitcast=True), mask=exists)


@gluon.jit
def note_splits(item, part, programs, total, splits, max_tokens, ROW: gl.constexpr, shape):
    """Say of all rows of an item which of a part's programs have parts of it. ROW: a layout of rows."""
    row = gl.arange(0, shape.ROWS, ROW)
    q_row, _, exists = item.rows(row, part, shape)
    token = (item.q_start + q_row).to(gl.int64)
    field = splits + (token * shape.PARTS + part) * 3
    told = exists & (row % shape.G == 0) & (token < max_tokens)
    gl.store(field, program_of(item.origin, programs, total), mask=told)
    gl.store(field + 1, program_of(item.close - 1, programs, total), mask=told)
    gl.store(field + 2, row, mask=told)
