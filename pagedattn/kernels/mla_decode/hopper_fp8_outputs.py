"""Gluon: what a warpgroup of latent attention over rows of codes does with its half of an item's outputs: they are
written, with the states of programs that have the rest of the item, or left for the program that adds them to its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_items import HALF, LATENT
from .hopper_states import adds, note_splits, publish, state_of, sums_of, together, wait_published, write_sums


@gluon.jit
def _by_rows(factor, LAYOUT: gl.constexpr):
    """A factor of each row, as one of outputs in order."""
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT), assert_trivial=True), 0)


@gluon.jit
def _half_of(state, w: gl.constexpr, LAYOUT: gl.constexpr, shape):
    """Where a warpgroup's half of a partial state's outputs is."""
    row = gl.expand_dims(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    dim = w * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)), 1)
    return state + 2 * shape.ROWS + row * LATENT + dim


@gluon.jit
def _sums_at(state, w: gl.constexpr, shape):
    """Where a warpgroup leaves maximum and sum of a state, for the same one of another program: in the program's first
    place or in the second, of which one is in use then."""
    return state + w * (2 * shape.ROWS + shape.ROWS * LATENT)


@gluon.jit
def _add_states(w: gl.constexpr, acc, m_i, l_i, item, sharing, states, flags, shape):
    """A warpgroup's half of an item's state with those that the program adds to it."""
    LAYOUT: gl.constexpr = acc.type.layout
    _, _, exists = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), sharing.part, shape)
    first, last = sharing.of_item(item)
    span = 1
    while adds(span, sharing.nth - first, last - sharing.nth):
        nth = sharing.nth + span
        wait_published(w, nth, flags, sharing, shape)
        state = state_of(nth, False, sharing, states, shape)
        more = gl.load(_half_of(state, w, LAYOUT, shape), mask=gl.expand_dims(exists, 0), other=0, cache_modifier=".cg")
        other, sums = sums_of(_sums_at(state, w, shape), item, sharing, shape.ROW, shape)
        m_i, before, here = together(m_i, other)
        l_i = l_i * before + sums * here
        acc = acc * _by_rows(before, LAYOUT) + more.to(gl.float32, bitcast=True) * _by_rows(here, LAYOUT)
        span *= 2
    return acc, m_i, l_i


@gluon.jit
def _write(acc, w: gl.constexpr, item, part, whole, state, results, shape):
    """Write a warpgroup's half of an item's outputs, or of those of a partial state."""
    LAYOUT: gl.constexpr = acc.type.layout
    q_row, head, exists = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), part, shape)
    mask = gl.expand_dims(exists, 0)
    if whole:
        dim = w * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)), 1)
        place = (item.q_start + q_row).to(gl.int64) * results.so_t + head.to(gl.int64) * results.so_h
        outputs = acc.to(results.out.dtype.element_ty)
        gl.store(results.out + gl.expand_dims(place, 0) + dim, outputs, mask=mask)
    else:
        if state is not None:
            gl.store(_half_of(state, w, LAYOUT, shape), acc.to(gl.int32, bitcast=True), mask=mask)


@gluon.jit
def share(w: gl.constexpr, acc, m_i, l_i, at, stop, item, sharing, of_states, results, shape):
    """Write a warpgroup's half of tiles at..stop of an item, or leave it as part of a partial state: for the second
    launch, or with `flags` for another program. acc: outputs in order; m_i, l_i of both halves."""
    lse_out, splits, states, flags, max_tokens = of_states
    begins = item.origin == at
    whole = begins & (stop == item.close)
    if flags is not None:
        acc, m_i, l_i = _add_states(w, acc, m_i, l_i, item, sharing, states, flags, shape)
        whole = begins
    state, sums = None, None
    if states is not None:
        state = state_of(sharing.nth, begins, sharing, states, shape)
        sums = _sums_at(state, w, shape)
    if w == 0:
        if splits is not None:
            if begins:
                note_splits(item, sharing, splits, max_tokens, shape.ROW, shape)
        write_sums(m_i, l_i, item, sharing.part, whole, sums, lse_out, results.sl_t, shape)
    elif flags is not None:
        write_sums(m_i, l_i, item, sharing.part, whole, sums, None, results.sl_t, shape)
    LAYOUT: gl.constexpr = acc.type.layout
    factor = gl.where(whole, 1.0 / gl.where(l_i == 0, 1.0, l_i), 1.0)
    _write(acc * _by_rows(factor, LAYOUT), w, item, sharing.part, whole, state, results, shape)
    if flags is not None:
        if not whole:
            publish(w, flags, sharing, shape)
