"""Gluon: what a warpgroup of latent attention over rows of codes does with its half of an item's outputs: writes them,
with the states of programs that have the rest of the item, or leaves them for the program that adds them to its own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import merge_factors
from .hopper_items import HALF, LATENT
from .hopper_states import (
    merges_next,
    note_splits,
    publish,
    state_of,
    state_size,
    sums_of,
    wait_published,
    write_sums,
)


@gluon.jit
def _by_rows(factor, LAYOUT: gl.constexpr):
    """A factor of each row, as one of outputs in order."""
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT), assert_trivial=True), 0)


@gluon.jit
def _outputs_at(state, w: gl.constexpr, LAYOUT: gl.constexpr, shape):
    """Where a warpgroup's half of a partial state's outputs is."""
    row = gl.expand_dims(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    dim = w * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)), 1)
    return state + 2 * shape.ROWS + row * LATENT + dim


@gluon.jit
def _sums_at(state, w: gl.constexpr, shape):
    """Where a warpgroup leaves the maximum and sum of a state, for the same warpgroup of another program: the first one
    with the state, the second one in the program's other place, which is not used then."""
    return state + w * state_size(shape)


@gluon.jit
def _add_states(w: gl.constexpr, acc, m_i, l_i, item, split, states, flags, shape):
    """A warpgroup's half of an item's state with those that the program adds to it."""
    LAYOUT: gl.constexpr = acc.type.layout
    _, _, exists = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), split.part, shape)
    first, last = split.of_item(item)
    span = 1
    while merges_next(span, split.range_id - first, last - split.range_id):
        other = split.range_id + span
        wait_published(w, other, flags, split, shape)
        state = state_of(other, False, split, states, shape)
        more = gl.load(
            _outputs_at(state, w, LAYOUT, shape), mask=gl.expand_dims(exists, 0), other=0, cache_modifier=".cg"
        )
        top, sums = sums_of(_sums_at(state, w, shape), item, split, shape.ROW, shape)
        m_i, before, here = merge_factors(m_i, top)
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
            gl.store(_outputs_at(state, w, LAYOUT, shape), acc.to(gl.int32, bitcast=True), mask=mask)


@gluon.jit
def write_or_publish(w: gl.constexpr, acc, m_i, l_i, at, stop, item, split, of_states, results, shape):
    """Write a warpgroup's half of the outputs of tiles at..stop of an item, or leave it as part of a partial state: for
    the second launch, or with `flags` for the program that has earlier tiles. acc: outputs in order; m_i and l_i are of
    both halves."""
    lse_out, splits, states, flags, max_tokens = of_states
    begins = item.origin == at
    whole = begins & (stop == item.close)
    if flags is not None:
        acc, m_i, l_i = _add_states(w, acc, m_i, l_i, item, split, states, flags, shape)
        whole = begins
    state, sums = None, None
    if states is not None:
        state = state_of(split.range_id, begins, split, states, shape)
        sums = _sums_at(state, w, shape)
    if w == 0 and splits is not None:
        if begins:
            note_splits(item, split, splits, max_tokens, shape.ROW, shape)
    if w == 0 or flags is not None:
        write_sums(m_i, l_i, item, split.part, whole, sums, lse_out if w == 0 else None, results.sl_t, shape)
    LAYOUT: gl.constexpr = acc.type.layout
    factor = gl.where(whole, 1.0 / gl.where(l_i == 0, 1.0, l_i), 1.0)
    _write(acc * _by_rows(factor, LAYOUT), w, item, split.part, whole, state, results, shape)
    if flags is not None:
        if not whole:
            publish(w, flags, split, shape)
