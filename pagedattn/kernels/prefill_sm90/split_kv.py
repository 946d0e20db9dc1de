"""Gluon: partial states of prefill on Hopper, where several items are splits of the keys of one query block.

A partial is a consumer's: running maximum, running sum and unnormalised output of its 64 rows. `reduce_splits` adds up
those of a block in a launch of its own, by many programs: what a consumer adds up by itself, one SM alone reads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.workspace import COUNTERS as _COUNTERS
from .work_item import CONSUMERS, ROWS

COUNTERS = gl.constexpr(_COUNTERS)


@gluon.jit
def _by_thread(acc):
    """Outputs [64, D] as [D / 4, 256], each thread's beside those of its neighbours: whole lines are moved at a time.
    Registers stay where they are. Eight columns of all rows, then the next; of rows r those of one r // 8 % 2 first."""
    D: gl.constexpr = acc.shape[1]
    return acc.reshape([4, 2, 8, D // 8, 8]).permute((3, 1, 0, 2, 4)).reshape([D // 4, 256])


@gluon.jit
def publish(acc, m_i, l_i, workspace, item, w: gl.constexpr, shape):
    """Leave the state of an item's rows in the workspace, as bits: maxima [64], sums [64], outputs by `_by_thread`, of
    one part of the head after the other."""
    place = (item.origin + item.nth) * CONSUMERS + w
    state = workspace + 3 * COUNTERS + place * (ROWS * (shape.D + shape.MORE_V + 2))
    row = gl.arange(0, ROWS, m_i.type.layout)
    gl.store(state + row, m_i.to(gl.int32, bitcast=True))
    gl.store(state + ROWS + row, l_i.to(gl.int32, bitcast=True))
    for i in gl.static_range(len(acc)):
        outputs = _by_thread(acc[i])
        line = gl.arange(0, outputs.shape[0], gl.SliceLayout(1, outputs.type.layout))
        column = gl.arange(0, 256, gl.SliceLayout(0, outputs.type.layout))
        target = state + (2 + i * shape.D) * ROWS + gl.expand_dims(line * 256, 1) + gl.expand_dims(column, 0)
        gl.store(target, outputs.to(gl.int32, bitcast=True))
