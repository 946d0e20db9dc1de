"""Gluon: the two warpgroups' states of an item over latent rows of codes, added up; each has half of the outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import merge_factors
from .hopper_items import HALF


@gluon.jit
def _by_thread(acc):
    """Half of a warpgroup's sums, [HALF / 2, ROWS], as [ROWS / 4, 512]: four of a thread beside each other, and those
    of the next thread behind them."""
    R: gl.constexpr = acc.shape[1]
    return acc.reshape([2, 4, 2, 8, R // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6)).reshape([R // 4, 512])


@gluon.jit
def _by_channel(sums, MMA: gl.constexpr):
    """`_by_thread` undone."""
    R: gl.constexpr = 4 * sums.shape[0]
    acc = sums.reshape([2, R // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6)).reshape([HALF // 2, R])
    return gl.convert_layout(acc, MMA, assert_trivial=True)


@gluon.jit
def _parts(acc):
    """The two halves of sums [HALF, ROWS]."""
    return gl.split(acc.reshape([2, HALF // 2, acc.shape[1]]).permute((1, 2, 0)))


@gluon.jit
def _joined(first, second, MMA: gl.constexpr):
    """`_parts` undone."""
    acc = gl.join(first, second).permute((2, 0, 1)).reshape([HALF, first.shape[1]])
    return gl.convert_layout(acc, MMA, assert_trivial=True)


@gluon.jit
def _exchange(w: gl.constexpr, kept, sent, n, rooms, shape):
    """Sums that a warpgroup keeps and those that the other sends. Queries are no longer read."""
    room = rooms.passed(shape.ROWS)
    sums = _by_thread(kept)
    room.index(w).store(_by_thread(sent))
    n = rooms.meet(n)
    sums += room.index(1 - w).load(sums.type.layout)
    n = rooms.meet(n)  # the place may be written again
    return _by_channel(sums, shape.MMA), n


@gluon.jit
def total(w: gl.constexpr, low, high, m_i, l_i, n, rooms, shape):
    """The w-th half of the outputs, maximum and sum of both warpgroups' states. n: how often they have met."""
    rooms.sums.index(2 * w).store(m_i)
    rooms.sums.index(2 * w + 1).store(l_i)
    n = rooms.meet(n)
    other = rooms.sums.index(2 * (1 - w)).load(shape.ROW)
    top, factor, here = merge_factors(m_i, other)
    l_i = l_i * factor + rooms.sums.index(2 * (1 - w) + 1).load(shape.ROW) * here
    factor = gl.expand_dims(factor, 0)
    kept_first, kept_second = _parts((low if w == 0 else high) * factor)
    sent_first, sent_second = _parts((high if w == 0 else low) * factor)
    first, n = _exchange(w, kept_first, sent_first, n, rooms, shape)
    second, n = _exchange(w, kept_second, sent_second, n, rooms, shape)
    return _joined(first, second, shape.MMA), top, l_i, n
