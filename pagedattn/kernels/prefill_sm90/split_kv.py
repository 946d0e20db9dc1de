"""Gluon: partial states of prefill on Hopper, where several items are parts of the keys of one query block.

A partial is a consumer's: running maximum, running sum and unnormalised output of its 64 rows. As in the decode
kernel's `split_kv`, the consumer that arrives last adds all of them up, in their order, so that the result's bits do
not depend on which that was, and none waits for another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.workspace import COUNTERS as _COUNTERS
from ..gluon_device import is_last
from ..gluon_names import thread_barrier
from .work_item import CONSUMERS, ROWS

COUNTERS = gl.constexpr(_COUNTERS)
GROUP = gl.constexpr(16)  # states that one consumer adds up
AT_ONCE = gl.constexpr(2)  # unrolled, so that what registers have room for is in flight
AT_ONCE_OF_LINES = gl.constexpr(4)
LINES = gl.constexpr(16)  # of 256 outputs, that are added up at a time where heads are wide
WIDEST_ROW = gl.constexpr(128)  # outputs of which registers have room for AT_ONCE states and their sum
LINE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0]))  # that of `_by_thread`


@gluon.jit
def _state(workspace, place, w: gl.constexpr, shape):
    return workspace + 3 * COUNTERS + (place * CONSUMERS + w) * (ROWS * (shape.D + shape.MORE_V + 2))


@gluon.jit
def _by_thread(acc):
    """Outputs [64, D] as [D / 4, 256], each thread's beside those of its neighbours: whole lines are moved at a time.
    Registers stay where they are."""
    D: gl.constexpr = acc.shape[1]
    return acc.reshape([4, 2, 8, D // 8, 8]).permute((1, 3, 0, 2, 4)).reshape([D // 4, 256])


@gluon.jit
def _by_row(acc):
    """The other way round."""
    D: gl.constexpr = acc.shape[0] * 4
    return acc.reshape([2, D // 8, 4, 8, 8]).permute((2, 0, 3, 1, 4)).reshape([ROWS, D])


@gluon.jit
def _outputs(state, like):
    row = gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    column = gl.arange(0, 256, gl.SliceLayout(0, like.type.layout))
    return state + 2 * ROWS + gl.expand_dims(row * 256, 1) + gl.expand_dims(column, 0)


@gluon.jit
def _publish_rows(m_i, l_i, state):
    row = gl.arange(0, ROWS, m_i.type.layout)
    gl.store(state + row, m_i.to(gl.int32, bitcast=True))
    gl.store(state + ROWS + row, l_i.to(gl.int32, bitcast=True))


@gluon.jit
def _publish(acc, m_i, l_i, state, shape):
    _publish_rows(m_i, l_i, state)
    for i in gl.static_range(len(acc)):
        outputs = _by_thread(acc[i])
        gl.store(_outputs(state + i * ROWS * shape.D, outputs), outputs.to(gl.int32, bitcast=True))


@gluon.jit
def _zeros(acc):
    zeros = ()
    for i in gl.static_range(len(acc)):
        zeros = zeros + (gl.zeros_like(acc[i]),)  # noqa: RUF005 - no stars in a kernel
    return zeros


@gluon.jit
def _load_outputs(state, acc, shape):
    """What `_publish` stored, in the layouts of `acc`."""
    loaded = ()
    for i in gl.static_range(len(acc)):
        place = _outputs(state + i * ROWS * shape.D, _by_thread(acc[i]))
        outputs = _by_row(gl.load(place, cache_modifier=".cg").to(gl.float32, bitcast=True))
        loaded = loaded + (gl.convert_layout(outputs, acc[i].type.layout, True),)  # noqa: RUF005
    return loaded


@gluon.jit
def _add(acc, before, outputs, here):
    """acc * before + outputs * here, factors of rows."""
    sums = ()
    for i in gl.static_range(len(acc)):
        scaled = acc[i] * gl.expand_dims(gl.convert_layout(before, gl.SliceLayout(1, acc[i].type.layout)), 1)
        factor = gl.expand_dims(gl.convert_layout(here, gl.SliceLayout(1, acc[i].type.layout)), 1)
        sums = sums + (scaled + outputs[i] * factor,)  # noqa: RUF005
    return sums


@gluon.jit
def _row_sums(state, row, live):
    """Maxima and sums of a state's rows, as of rows that saw nothing where it is none."""
    m = gl.load(state + row, cache_modifier=".cg").to(gl.float32, bitcast=True)
    sums = gl.load(state + ROWS + row, cache_modifier=".cg").to(gl.float32, bitcast=True)
    return gl.where(live, m, -float("inf")), sums


@gluon.jit
def _factors(m_i, m):
    """The larger of two maxima, and what sums under each are multiplied by."""
    top = gl.maximum(m_i, m)
    shift = gl.where(top == -float("inf"), 0.0, top)
    return top, gl.exp2(m_i - shift), gl.exp2(m - shift)


@gluon.jit
def _reduce_splits(
    acc, m_i, workspace, start, count, STRIDE: gl.constexpr, w: gl.constexpr, shape, WITH_OUTPUTS: gl.constexpr
):
    """The states at `count` places together, every STRIDE from `start` on, in the layouts of those given; outputs not
    without WITH_OUTPUTS."""
    row = gl.arange(0, ROWS, m_i.type.layout)
    m_i = gl.full_like(m_i, -float("inf"))
    l_i = gl.zeros_like(m_i)
    if WITH_OUTPUTS:
        acc = _zeros(acc)
    for done in range(0, count, AT_ONCE):
        for nth in gl.static_range(AT_ONCE):
            live = done + nth < count
            state = _state(workspace, start + gl.where(live, done + nth, 0) * STRIDE, w, shape)
            m, sums = _row_sums(state, row, live)
            m_i, before, here = _factors(m_i, m)
            l_i = l_i * before + sums * here
            if WITH_OUTPUTS:
                acc = _add(acc, before, _load_outputs(state, acc, shape), here)
    return acc, m_i, l_i


@gluon.jit
def _reduce_lines(WIDTH: gl.constexpr, part, workspace, start, count, STRIDE: gl.constexpr, w: gl.constexpr, shape):
    """Outputs of a part of the head, from `part` in a state on, of the states that `_reduce_splits` takes: their sum
    takes the place of the first's. Some lines of all states, then the next."""
    HALF: gl.constexpr = WIDTH // 8  # lines of the first eight of sixteen rows
    SOME: gl.constexpr = min(LINES, HALF)
    line = gl.arange(0, SOME, gl.SliceLayout(1, LINE_LAYOUT))
    column = gl.arange(0, 256, gl.SliceLayout(0, LINE_LAYOUT))
    for first in range(0, 2 * HALF, SOME):
        row = column // 64 * 16 + first // HALF * 8 + column // 8 % 8
        place = 2 * ROWS + part + gl.expand_dims((first + line) * 256, 1) + gl.expand_dims(column, 0)
        m_i = gl.full([256], -float("inf"), gl.float32, gl.SliceLayout(0, LINE_LAYOUT))
        total = gl.zeros([SOME, 256], gl.float32, LINE_LAYOUT)
        for done in range(0, count, AT_ONCE_OF_LINES):
            for nth in gl.static_range(AT_ONCE_OF_LINES):
                live = done + nth < count
                state = _state(workspace, start + gl.where(live, done + nth, 0) * STRIDE, w, shape)
                m, _ = _row_sums(state, row, live)
                outputs = gl.load(state + place, cache_modifier=".cg").to(gl.float32, bitcast=True)
                m_i, before, here = _factors(m_i, m)
                total = total * gl.expand_dims(before, 0) + outputs * gl.expand_dims(here, 0)
        gl.store(_state(workspace, start, w, shape) + place, total.to(gl.int32, bitcast=True))


@gluon.constexpr_function
def _is_narrow(shape):
    return shape.D + shape.MORE_V <= WIDEST_ROW


@gluon.jit
def _reduce(acc, m_i, workspace, start, count, STRIDE: gl.constexpr, w: gl.constexpr, shape):
    """The states at `count` places together, but that outputs of wide heads are left in the first one's place. Every
    thread is done with them when it returns."""
    if not _is_narrow(shape):
        for i in gl.static_range(len(acc)):
            _reduce_lines(acc[i].shape[1], i * ROWS * shape.D, workspace, start, count, STRIDE, w, shape)
    acc, m_i, l_i = _reduce_splits(acc, m_i, workspace, start, count, STRIDE, w, shape, _is_narrow(shape))
    thread_barrier()
    return acc, m_i, l_i


@gluon.jit
def publish_and_reduce(acc, m_i, l_i, workspace, item, w: gl.constexpr, shape):
    """Publish this part's state. Whether it is the one that has those of all parts, and their union if so.

    More than GROUP parts are added up in groups first: one consumer alone would take long over so much data.
    """
    _publish(acc, m_i, l_i, _state(workspace, item.origin + item.nth, w, shape), shape)
    first = item.nth // GROUP * GROUP
    head = item.origin + first
    members = gl.minimum(item.parts - first, GROUP)
    complete = is_last(workspace + (head * CONSUMERS + w) * 2, members)
    if complete:
        acc, m_i, l_i = _reduce(acc, m_i, workspace, head, members, 1, w, shape)
        if item.parts > GROUP:
            if _is_narrow(shape):
                _publish(acc, m_i, l_i, _state(workspace, head, w, shape), shape)
            else:
                _publish_rows(m_i, l_i, _state(workspace, head, w, shape))
            groups = (item.parts + GROUP - 1) // GROUP
            complete = is_last(workspace + (item.origin * CONSUMERS + w) * 2 + 1, groups)
            if complete:
                acc, m_i, l_i = _reduce(acc, m_i, workspace, item.origin, groups, GROUP, w, shape)
        if not _is_narrow(shape):
            if complete:
                acc = _load_outputs(_state(workspace, item.origin, w, shape), acc, shape)
    return complete, acc, m_i, l_i
