"""Gluon: partial states of an item that several programs share, exchanged through the workspace while a kernel runs.

As in the decode kernel for other caches (`../decode/split_kv.py`, whose workspace this is): who arrives last adds all
of them up, in their order, and none waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.workspace import COUNTERS as _COUNTERS
from ..gluon_device import is_last, merge_factors
from ..gluon_names import thread_barrier
from .plan import GROUP as _GROUP
from .plan import MANY_ROWS as _MANY_ROWS

COUNTERS = gl.constexpr(_COUNTERS)
GROUP = gl.constexpr(_GROUP)
MANY_ROWS = gl.constexpr(_MANY_ROWS)
_IN_FLIGHT = gl.constexpr(8 * 16 * 128)  # elements of states whose loads are in flight together


@gluon.jit
def _state_at(workspace, kv_head, program, begins, KV_HEADS: gl.constexpr, SIZE: gl.constexpr):
    """Where a program's state of an item is; `begins`: whether the item starts in that program. It has two places,
    since it may end in the middle of one item and have started in the middle of another."""
    place = 2 * (program * KV_HEADS + kv_head) + gl.where(begins, 1, 0)
    return workspace + 3 * COUNTERS + place.to(gl.int64) * SIZE


@gluon.jit
def _publish(state, acc, m_i, l_i, USED: gl.constexpr):
    R: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    row = gl.arange(0, R, m_i.type.layout)
    gl.store(state + row, m_i.to(gl.int32, bitcast=True), mask=row < USED)
    gl.store(state + R + row, l_i.to(gl.int32, bitcast=True), mask=row < USED)
    dim = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))
    to = state + 2 * R + gl.expand_dims(row * DV, 1) + gl.expand_dims(dim, 0)
    gl.store(to, acc.to(gl.int32, bitcast=True), mask=gl.expand_dims(row < USED, 1))


@gluon.jit
def _reduce_splits(
    acc, m_i, workspace, kv_head, start, begins, count, STRIDE: gl.constexpr, KV_HEADS: gl.constexpr,
    USED: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """The states of `count` programs together, from program `start` on, every STRIDE, in the layouts of those given;
    `begins`: whether the item starts in the first of them.

    Factors of many rows pass through shared memory on their way to the threads: behind a barrier, without which ptxas
    has each row's outputs loaded only after the row before is done.
    """
    R: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    MANY: gl.constexpr = R == MANY_ROWS
    AT_ONCE: gl.constexpr = 1 if MANY else min(max(_IN_FLIGHT // (R * DV), 1), 8)  # unrolled
    ROWS: gl.constexpr = m_i.type.layout
    HEAD: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0]) if MANY else ROWS
    head, row = gl.arange(0, R, HEAD), gl.arange(0, R, ROWS)
    dim = gl.arange(0, DV, gl.SliceLayout(0, acc.type.layout))
    place = 2 * R + gl.expand_dims(row * DV, 1) + gl.expand_dims(dim, 0)
    m_i = gl.full([R], -float("inf"), gl.float32, HEAD)
    l_i = gl.zeros_like(m_i)
    acc = gl.zeros_like(acc)
    for done in range(0, count, AT_ONCE):
        for nth in gl.static_range(AT_ONCE):
            live = done + nth < count
            which = gl.where(live, done + nth, 0)
            state = _state_at(workspace, kv_head, start + which * STRIDE, begins & (which == 0), KV_HEADS, SIZE)
            m = gl.load(state + head, mask=head < USED, other=0, cache_modifier=".cg").to(gl.float32, bitcast=True)
            sums = gl.load(state + R + head, mask=head < USED, other=0, cache_modifier=".cg")
            a = gl.load(state + place, mask=gl.expand_dims(row < USED, 1), other=0, cache_modifier=".cg")
            m = gl.where(live, m, -float("inf"))
            m_i, before, here = merge_factors(m_i, m)
            l_i = l_i * before + sums.to(gl.float32, bitcast=True) * here
            before, here = gl.convert_layout(before, ROWS), gl.convert_layout(here, ROWS)
            acc = acc * gl.expand_dims(before, 1) + a.to(gl.float32, bitcast=True) * gl.expand_dims(here, 1)
    return acc, gl.convert_layout(m_i, ROWS), gl.convert_layout(l_i, ROWS)


@gluon.jit
def publish_and_reduce(
    acc, m_i, l_i, workspace, kv_head, program, begins, first, last, KV_HEADS: gl.constexpr, USED: gl.constexpr
):
    """Publish this program's part of an item that programs first..last share, and that `begins` in this one or not.
    Whether it is the one that has all of them, and their union if so. USED: rows that are."""
    SIZE: gl.constexpr = acc.shape[0] * (acc.shape[1] + 2)
    _publish(_state_at(workspace, kv_head, program, begins, KV_HEADS, SIZE), acc, m_i, l_i, USED)
    group = (program - first) // GROUP
    groups = (last - first) // GROUP + 1
    head = first + group * GROUP
    members = gl.minimum(GROUP, last + 1 - head)
    complete = is_last(workspace + 2 * (head * KV_HEADS + kv_head) + gl.where(group == 0, 1, 0), members)
    if complete:
        acc, m_i, l_i = _reduce_splits(acc, m_i, workspace, kv_head, head, group == 0, members, 1, KV_HEADS, USED, SIZE)
        if groups > 1:
            thread_barrier()  # every thread has read the head's state before it is replaced
            _publish(_state_at(workspace, kv_head, head, group == 0, KV_HEADS, SIZE), acc, m_i, l_i, USED)
            complete = is_last(workspace + 2 * COUNTERS + first * KV_HEADS + kv_head, groups)
            if complete:
                acc, m_i, l_i = _reduce_splits(
                    acc, m_i, workspace, kv_head, first, first >= 0, groups, GROUP, KV_HEADS, USED, SIZE
                )
    return complete, acc, m_i, l_i
