"""Gluon: the two computing warpgroups of latent attention on Hopper.

The first one computes logits and weights, and both multiply the weights by their half of the latent elements: while the
second one does, the first is at the logits of the next tile.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_device import LOG2E, tanh
from ..gluon_names import thread_barrier
from .hopper_items import HALF, KEYS, LATENT, ROPE, range_of_program, visible
from .hopper_states import note_splits, state_of, write_sums

STAGES = gl.constexpr(2)  # of tiles
WARPS = gl.constexpr(4)  # of a group
SOME = gl.constexpr(8)  # rows that a group copies at a time, so that registers hold them beside outputs


@aggregate
class Rooms:
    """Shared memory: the parts of tiles and of queries, weights [KEYS, ROWS] or transposed, a factor of each row,
    and barriers.

    full, empty: of tiles, of which both groups say that they are done. given, taken: of weights and factors, of each
    tile and at the end of an item once more, with what outputs are divided by.
    """

    latent: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    q_latent: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    given: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, latent, rope, q_latent, q_rope, weights, factors, full, empty, given, taken):
        self.latent, self.rope, self.q_latent, self.q_rope = latent, rope, q_latent, q_rope
        self.weights, self.factors = weights, factors
        self.full, self.empty, self.given, self.taken = full, empty, given, taken

    @gluon.jit
    def wait_full(self, c):
        mbarrier.wait(self.full.index(c % STAGES), (c // STAGES) & 1)

    @gluon.jit
    def wait_empty(self, c):
        mbarrier.wait(self.empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, c):
        mbarrier.arrive(self.empty.index(c % STAGES), count=1)

    @gluon.jit
    def tile(self, c):
        return self.latent.index(c % STAGES).reshape([KEYS, LATENT])

    @gluon.jit
    def values(self, c, w: gl.constexpr):
        """A group's latent elements of a tile, [KEYS, HALF]."""
        return self.tile(c).slice(w * HALF, HALF, 1)

    @gluon.jit
    def wait_taken(self, t):
        """Until what was given before turn t has been taken."""
        mbarrier.wait(self.taken, (t & 1) ^ 1)

    @gluon.jit
    def wait_given(self, t):
        mbarrier.wait(self.given, t & 1)


@aggregate
class Results:
    """Where outputs go, out [T, Hq, L], and the strides of it by token and head, and of the LSE by token."""

    out: gl.tensor
    so_t: gl.tensor
    so_h: gl.tensor
    sl_t: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, so_t, so_h, sl_t):
        self.out, self.so_t, self.so_h, self.sl_t = out, so_t, so_h, sl_t


@gluon.jit
def _load_queries(query, sq_t, sq_h, item, part, rooms, shape):
    """An item's rows into shared memory, zeros where there are none: all copies are under way at once, where rows can
    be read 16 bytes at a time."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for i in gl.static_range(shape.ROWS // SOME):
        row = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
        q_row, head, exists = item.rows(row, part, shape)
        start = query + gl.expand_dims((item.q_start + q_row).to(gl.int64) * sq_t + head.to(gl.int64) * sq_h, 1)
        mask = gl.expand_dims(exists, 1)
        latent = start + gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, WIDE)), 0)
        rope = start + LATENT + gl.expand_dims(gl.arange(0, ROPE, gl.SliceLayout(0, WIDE)), 0)
        if shape.ALIGNED:
            async_copy.async_copy_global_to_shared(rooms.q_latent.slice(i * SOME, SOME), latent, mask=mask)
            async_copy.async_copy_global_to_shared(rooms.q_rope.slice(i * SOME, SOME), rope, mask=mask)
        else:
            rooms.q_latent.slice(i * SOME, SOME).store(gl.load(latent, mask=mask, other=0.0))
            rooms.q_rope.slice(i * SOME, SOME).store(gl.load(rope, mask=mask, other=0.0))
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _zero_rows(latent, begin, end):
    """Rows outside begin..end of a tile become 0: their weights are 0, but 0 * NaN would reach the output."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for i in gl.static_range(KEYS // SOME):
        if (i * SOME + SOME > end) | (i * SOME < begin):
            rows = latent.slice(i * SOME, SOME)
            index = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
            values = rows.load(WIDE)
            kept = gl.expand_dims((index >= begin) & (index < end), 1)
            rows.store(gl.where(kept, values, gl.zeros_like(values)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _weights(s, m_i, q_pos, key, past, scale, softcap, MASKED: gl.constexpr, shape):
    """Weights of a tile's keys from its logits, the rows' new maximum, and what states so far are multiplied with."""
    if shape.SOFTCAP:
        s = tanh(s * (scale / (softcap * LOG2E))) * (softcap * LOG2E)
    else:
        s = s * scale
    if MASKED:
        offs_n = gl.expand_dims(key + gl.arange(0, KEYS, gl.SliceLayout(1 - shape.AXIS, shape.LOGITS)), 1 - shape.AXIS)
        s = gl.where(visible(q_pos, offs_n, past, shape.AXIS, shape), s, -float("inf"))
    top = gl.maximum(m_i, gl.max(s, shape.AXIS))
    shift = gl.where(top == -float("inf"), 0.0, top)
    return gl.exp2(s - gl.expand_dims(shift, shape.AXIS)), top, gl.exp2(m_i - shift)


@gluon.jit
def _times(acc, factor, shape):
    """Outputs times a factor of each row."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(shape.AXIS, shape.OUTPUT)), shape.AXIS)


@gluon.jit
def _logits(c, rooms, shape):
    """Products of an item's rows with a tile's keys."""
    s = gl.zeros(shape.WEIGHTS, gl.float32, shape.LOGITS)
    rope = rooms.rope.index(c % STAGES).reshape([KEYS, ROPE])
    if shape.AXIS == 1:
        s = warpgroup_mma(rooms.q_latent, rooms.tile(c).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(rooms.q_rope, rope.permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(rooms.tile(c), rooms.q_latent.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(rope, rooms.q_rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _add_values(acc, weights, values, shape):
    """Outputs and what a tile's values add to them; weights in shared memory, with AXIS 1 in registers or there."""
    if shape.AXIS == 1:
        acc = warpgroup_mma(weights, values, acc, is_async=True)
    else:
        acc = warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
    return acc


@gluon.jit
def _lead_tiles(item, begin, past, c, t, q_pos, scale, softcap, rooms, shape):
    """The first group's state after keys begin..past, and the numbers of tiles and turns until then."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(shape.AXIS, shape.LOGITS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.OUTPUT, k_width=2)
    m_i = gl.full([shape.ROWS], -float("inf"), gl.float32, OF_ROWS)
    l_i = gl.zeros([shape.ROWS], gl.float32, OF_ROWS)
    acc = gl.zeros(shape.OUTPUTS, gl.float32, shape.OUTPUT)
    whole = past  # keys that every row sees end there
    if shape.CAUSAL:
        whole = gl.minimum(past, item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q + 1)
    for key in range(begin, past, KEYS):
        rooms.wait_full(c)
        if (key + KEYS > past) | (key < item.low):
            _zero_rows(rooms.tile(c), item.low - key, past - key)
        s = _logits(c, rooms, shape)
        if (key + KEYS <= whole) & (shape.WINDOW == 0):
            p, m_i, alpha = _weights(s, m_i, q_pos, key, past, scale, softcap, False, shape)
        else:
            p, m_i, alpha = _weights(s, m_i, q_pos, key, past, scale, softcap, True, shape)
        rooms.wait_taken(t)
        weights = p.to(shape.DTYPE)
        rooms.weights.store(weights)
        rooms.factors.store(alpha)
        fence_async_shared()
        mbarrier.arrive(rooms.given, count=1)
        acc = _times(acc, alpha, shape)
        if shape.AXIS == 1:
            acc = _add_values(acc, gl.convert_layout(weights, OPERAND), rooms.values(c, 0), shape)
        else:
            acc = _add_values(acc, rooms.weights, rooms.values(c, 0), shape)
        l_i = l_i * alpha + gl.sum(p, shape.AXIS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        rooms.release(c)
        c += 1
        t += 1
    return acc, m_i, l_i, c, t


@gluon.jit
def _follow_tiles(begin, past, c, t, rooms, shape):
    """The same of the second group, which has outputs alone."""
    acc = gl.zeros(shape.OUTPUTS, gl.float32, shape.OUTPUT)
    for _ in range(begin, past, KEYS):
        rooms.wait_full(c)
        rooms.wait_given(t)
        acc = _times(acc, rooms.factors.load(gl.SliceLayout(shape.AXIS, shape.OUTPUT)), shape)
        acc = _add_values(acc, rooms.weights, rooms.values(c, 1), shape)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(rooms.taken, count=1)
        rooms.release(c)
        c += 1
        t += 1
    return acc, c, t


@gluon.jit
def _finish(acc, w: gl.constexpr, item, part, results, rooms, shape):
    """Write a group's half of an item's output, by way of the queries' memory, to have 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    half = rooms.q_latent.slice(w * HALF, HALF, 1)
    if shape.AXIS == 1:
        half.store(acc.to(shape.DTYPE))
    else:
        half.permute((1, 0)).store(acc.to(shape.DTYPE))
    thread_barrier()
    for i in gl.static_range(shape.ROWS // SOME):
        row = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
        q_row, head, exists = item.rows(row, part, shape)
        place = (item.q_start + q_row).to(gl.int64) * results.so_t + head.to(gl.int64) * results.so_h
        dim = gl.expand_dims(w * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE)), 0)
        rows = half.slice(i * SOME, SOME).load(WIDE)
        gl.store(results.out + gl.expand_dims(place, 1) + dim, rows, mask=gl.expand_dims(exists, 1))


@gluon.jit
def _publish(acc, w: gl.constexpr, item, part, state, shape):
    """Leave a group's half of a partial state."""
    row = gl.arange(0, shape.ROWS, gl.SliceLayout(shape.AXIS, shape.OUTPUT))
    _, _, exists = item.rows(row, part, shape)
    dim = w * HALF + gl.arange(0, HALF, gl.SliceLayout(1 - shape.AXIS, shape.OUTPUT))
    to = state + 2 * shape.ROWS + gl.expand_dims(row * LATENT, shape.AXIS) + gl.expand_dims(dim, 1 - shape.AXIS)
    gl.store(to, acc.to(gl.int32, bitcast=True), mask=gl.expand_dims(exists, shape.AXIS))


@gluon.jit
def lead(query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape):
    """The first group: the program's items, their logits, weights and first half of latent elements."""
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    gdc_launch_dependents()
    at, end, seq, base, split = range_of_program(step, shape, WARPS)
    part = split.part
    c = 0
    t = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            rooms.wait_taken(t)  # the second group has left the queries' memory
            _load_queries(query, sq_t, sq_h, item, part, rooms, shape)
            q_row, _, _ = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(shape.AXIS, shape.LOGITS)), part, shape)
            begin, past = item.key_range(at, stop)
            q_pos = item.seq_len - item.q_len + q_row
            acc, m_i, l_i, c, t = _lead_tiles(item, begin, past, c, t, q_pos, scale, softcap, rooms, shape)
            whole = (item.origin == at) & (stop == item.close)
            factor = 1.0 / gl.where(l_i == 0, 1.0, l_i)
            rooms.wait_taken(t)
            rooms.factors.store(factor)
            mbarrier.arrive(rooms.given, count=1)
            t += 1
            state = None
            if splits is not None:
                state = state_of(split.range_id, item.origin == at, split, states, shape)
                if item.origin == at:
                    ROW: gl.constexpr = gl.SliceLayout(shape.AXIS, shape.LOGITS)
                    note_splits(item, split, splits, max_tokens, ROW, shape)
            write_sums(m_i, l_i, item, part, whole, state, lse_out, results.sl_t, shape)
            if whole:
                _finish(_times(acc, factor, shape), 0, item, part, results, rooms, shape)
            else:
                if splits is not None:
                    _publish(acc, 0, item, part, state, shape)
            thread_barrier()  # the next item's queries are not stored before
        at = stop


@gluon.jit
def follow(states, results, rooms, step, shape):
    """The second group: the other half of latent elements."""
    gdc_wait()
    at, end, seq, base, split = range_of_program(step, shape, WARPS)
    part = split.part
    c = 0
    t = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:
            at = gl.maximum(at, item.origin)
            begin, past = item.key_range(at, stop)
            acc, c, t = _follow_tiles(begin, past, c, t, rooms, shape)
            rooms.wait_given(t)
            if (item.origin == at) & (stop == item.close):
                factor = rooms.factors.load(gl.SliceLayout(shape.AXIS, shape.OUTPUT))
                _finish(_times(acc, factor, shape), 1, item, part, results, rooms, shape)
            else:
                if states is not None:
                    state = state_of(split.range_id, item.origin == at, split, states, shape)
                    _publish(acc, 1, item, part, state, shape)
            mbarrier.arrive(rooms.taken, count=1)
            t += 1
        at = stop
