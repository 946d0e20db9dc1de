"""Gluon: what a program of a Hopper kernel for latent attention leaves of an item besides outputs: the LSE, or its
partial state's place, maximum and sum, and for whom: the second launch, or the program that adds it to its own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.workspace import COUNTERS
from ..gluon_device import LN2
from ..gluon_names import thread_barrier
from .hopper_items import LATENT

_FLAGS = gl.constexpr(COUNTERS)  # of one warpgroup of all programs


@gluon.constexpr_function
def state_size(shape):
    """Elements of a partial state: maxima, sums, outputs."""
    return shape.ROWS.value * (2 + LATENT.value)


@gluon.jit
def state_of(range_id, begins, split, states, shape):
    """The place of a range's partial state. A program may end inside one item, which `begins` there, and start inside
    another: it has two."""
    place = 2 * (range_id * shape.PARTS + split.part) + gl.where(begins, 1, 0)
    return states + place.to(gl.int64) * state_size(shape)


@gluon.jit
def sums_of(state, item, split, LAYOUT: gl.constexpr, shape):
    """Maximum and sum of a partial state that another program has left."""
    row = gl.arange(0, shape.ROWS, LAYOUT)
    _, _, exists = item.rows(row, split.part, shape)
    m_i = gl.load(state + row, mask=exists, other=0, cache_modifier=".cg").to(gl.float32, bitcast=True)
    l_i = gl.load(state + shape.ROWS + row, mask=exists, other=0, cache_modifier=".cg").to(gl.float32, bitcast=True)
    return m_i, l_i


@gluon.jit
def _flag_of(w: gl.constexpr, range_id, flags, split, shape):
    """The counter by which the w-th warpgroup of a range's program says that it has left its part of a state."""
    return flags + w * _FLAGS + range_id * shape.PARTS + split.part


@gluon.jit
def publish(w: gl.constexpr, flags, split, shape):
    """Say that the program's w-th warpgroup has left its part of a state."""
    thread_barrier()  # all threads' stores come before what publishes them
    gl.atomic_xchg(_flag_of(w, split.range_id, flags, split, shape), 1, sem="release", scope="gpu")


@gluon.jit
def wait_published(w: gl.constexpr, range_id, flags, split, shape):
    """Spin until the program of a range has published its state, and reset its flag: they are zero between launches."""
    flag = _flag_of(w, range_id, flags, split, shape)
    seen = 0
    while seen == 0:
        seen = gl.atomic_cas(flag, 1, 0, sem="acquire", scope="gpu")


@gluon.jit
def merges_next(span, before, behind):
    """Whether a program adds to its state that of the range `span` behind its own. before, behind: other ranges with
    tiles of its item. They are a binary tree, so that bits do not depend on who is done first."""
    return (before % (2 * span) == 0) & (span <= behind)


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
def note_splits(item, split, splits, max_tokens, ROW: gl.constexpr, shape):
    """Say of all rows of an item which of a part's ranges have parts of it. ROW: a layout of rows."""
    row = gl.arange(0, shape.ROWS, ROW)
    q_row, _, exists = item.rows(row, split.part, shape)
    token = (item.q_start + q_row).to(gl.int64)
    field = splits + (token * shape.PARTS + split.part) * 3
    told = exists & (row % shape.G == 0) & (token < max_tokens)
    first, last = split.of_item(item)
    gl.store(field, first, mask=told)
    gl.store(field + 1, last, mask=told)
    gl.store(field + 2, row, mask=told)
