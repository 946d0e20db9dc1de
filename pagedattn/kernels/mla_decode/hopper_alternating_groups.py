"""Gluon: the two computing warpgroups of latent attention on Hopper that take tiles in turn.

Group W has tiles W, W + 2, ... of an item: it computes their logits and weights. Of outputs it has half W of the latent
elements, of all tiles. So the steps of a tile k are S_k = Q K_k^T; the other group's weights of tile k - 1 times its
half of V_(k-1), which the tensor cores do while it computes the weights P_k; and P_k times its half of V_k. Meanwhile
the other group is at the logits of tile k + 1. Source of the exchange of weights: FlashMLA (2025).

The running maximum passes from tile to tile, through shared memory; a row's factor is known to both groups from two
maxima. A row's sum is kept apart, and added up at the end of an item.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_names import thread_barrier
from .hopper_groups import WARPS, finish, load_queries, publish, times, weights_of, zero_rows
from .hopper_items import HALF, KEYS, ROPE
from .hopper_states import note_splits, state_of, write_sums


@aggregate
class Rooms:
    """Shared memory: of each of two tiles the halves [2 x 2, KEYS, 1, HALF] of the latent part, the rotated part and
    later the weights, and the running maximum after it; queries, as they are stored and, `all_`, with a dimension of 1
    before; what logits are multiplied with, sums of each group, and barriers.

    All barriers count one arrival. full, empty [2 tiles x 2 halves]: a half is there; the group whose half of outputs
    it adds to, which reads it last, is done. The rotated part is there with the half that comes second, and is free
    when both are. given [2]: weights and maximum of a tile are there. summed [2]: a group's sums of an item are there.
    queries: those of an item are there. left: the second group is done with an item.
    """

    halves: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    q_latent: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    all_latent: gl.shared_memory_descriptor
    all_rope: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    given: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, halves, rope, q_latent, q_rope, all_latent, all_rope, scales, tops, sums, full, empty, given, summed,
        queries, left,
    ):  # fmt: skip
        self.halves, self.rope, self.q_latent, self.q_rope = halves, rope, q_latent, q_rope
        self.all_latent, self.all_rope = all_latent, all_rope
        self.scales, self.tops, self.sums = scales, tops, sums
        self.full, self.empty, self.given, self.summed = full, empty, given, summed
        self.queries, self.left = queries, left

    @gluon.jit
    def wait_full(self, c, which):
        mbarrier.wait(self.full.index(2 * (c % 2) + which), (c // 2) & 1)

    @gluon.jit
    def wait_empty(self, c, which):
        mbarrier.wait(self.empty.index(2 * (c % 2) + which), ((c // 2) & 1) ^ 1)

    @gluon.jit
    def release(self, c, which):
        mbarrier.arrive(self.empty.index(2 * (c % 2) + which), count=1)

    @gluon.jit
    def wait_given(self, c):
        mbarrier.wait(self.given.index(c % 2), (c // 2) & 1)

    @gluon.jit
    def half(self, c, which):
        """[KEYS, HALF] of a tile."""
        return self.halves.index(2 * (c % 2) + which).reshape([KEYS, HALF])

    @gluon.jit
    def queries_of(self, c):
        """The queries, which are the same for all tiles. c >> 30 is 0, which the compiler does not know: else it would
        keep 36 operands' descriptors over the loop, in spilled registers."""
        return self.all_latent.index(c >> 30), self.all_rope.index(c >> 30)

    @gluon.jit
    def rotated(self, c):
        """[KEYS, ROPE] of a tile, and then its weights [ROWS, KEYS]."""
        return self.rope.index(c % 2).reshape([KEYS, ROPE])


@gluon.jit
def _issue_logits(c, rooms, shape, W: gl.constexpr):
    """Products of an item's rows with the keys of tile c, under way; the halves in the order that they come."""
    s = gl.zeros(shape.WEIGHTS, gl.float32, shape.LOGITS)
    rooms.wait_full(c, W)
    q_latent, q_rope = rooms.queries_of(c)
    queries = q_latent.slice(W * HALF, HALF, 1)
    s = warpgroup_mma(queries, rooms.half(c, W).permute((1, 0)), s, use_acc=False, is_async=True)
    rooms.wait_full(c, 1 - W)
    queries = q_latent.slice((1 - W) * HALF, HALF, 1)
    s = warpgroup_mma(queries, rooms.half(c, 1 - W).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_rope, rooms.rotated(c).permute((1, 0)), s, is_async=True)


@gluon.jit
def _zero_unseen(item, key, past, c, rooms):
    """Keys of tile c that no row sees become 0."""
    if (key + KEYS > past) | (key < item.low):
        for which in gl.static_range(2):
            rooms.wait_full(c, which)
            zero_rows(rooms.half(c, which), item.low - key, past - key)


@gluon.jit
def _issue_other(acc, m_i, l_i, c, rooms, shape, W: gl.constexpr):
    """What the other group's tile c adds to a group's outputs, under way; the maximum after that tile, and sums."""
    rooms.wait_given(c)
    rooms.wait_full(c, W)
    top = rooms.tops.index(c % 2).load(gl.SliceLayout(1, shape.LOGITS))
    factor = gl.exp2(m_i - gl.where(top == -float("inf"), 0.0, top))
    acc = warpgroup_mma(rooms.rotated(c), rooms.half(c, W), times(acc, factor, shape), is_async=True)
    return acc, top, l_i * factor


@gluon.jit
def _scale(rooms, shape):
    """What logits are multiplied with, [ROWS, 1], read when no warp multiplies the rotated part any more. Were it in a
    register, ptxas would multiply logits, and wait for them, before it issues the product that is to run meanwhile."""
    thread_barrier()
    return gl.expand_dims(rooms.scales.load(gl.SliceLayout(1, shape.LOGITS)), 1)


@gluon.jit
def _give(p, top, c, rooms, shape):
    """Weights of tile c for the other group; the same as they are multiplied, in registers."""
    weights = p.to(shape.DTYPE)
    rooms.rotated(c).store(weights)
    rooms.tops.index(c % 2).store(top)
    fence_async_shared()
    mbarrier.arrive(rooms.given.index(c % 2), count=1)
    return gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=shape.OUTPUT, k_width=2))


@gluon.jit
def _add_own(acc, weights, factor, c, rooms, shape, W: gl.constexpr):
    acc = warpgroup_mma(weights, rooms.half(c, W), times(acc, factor, shape), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    rooms.release(c, W)
    return acc


@gluon.jit
def _attend_tiles(item, begin, past, c, q_pos, softcap, rooms, shape, W: gl.constexpr):
    """A group's half of the outputs over keys begin..past, whose first tile is number c, the maximum of all and the
    sums of its own tiles."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, shape.LOGITS)
    m_i = gl.full([shape.ROWS], -float("inf"), gl.float32, OF_ROWS)
    l_i = gl.zeros([shape.ROWS], gl.float32, OF_ROWS)
    acc = gl.zeros(shape.OUTPUTS, gl.float32, shape.OUTPUT)
    whole = past  # keys that every row sees end there
    if shape.CAUSAL:
        whole = gl.minimum(past, item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q + 1)
    if W == 0:
        if begin < past:  # a tile before which there is none of the other group
            _zero_unseen(item, begin, past, c, rooms)
            s = warpgroup_mma_wait(0, deps=[_issue_logits(c, rooms, shape, W)])
            scale = _scale(rooms, shape)
            p, m_i, alpha = weights_of(s, m_i, q_pos, begin, past, scale, softcap, True, shape)
            acc = _add_own(acc, _give(p, m_i, c, rooms, shape), alpha, c, rooms, shape, W)
            l_i = gl.sum(p, 1)
    end = c + gl.maximum(past - begin + KEYS - 1, 0) // KEYS
    c += 2 - W
    for key in range(begin + (2 - W) * KEYS, past, 2 * KEYS):
        _zero_unseen(item, key, past, c, rooms)
        s = _issue_logits(c, rooms, shape, W)
        acc, m_i, l_i = _issue_other(acc, m_i, l_i, c - 1, rooms, shape, W)
        s = warpgroup_mma_wait(1, deps=[s])
        scale = _scale(rooms, shape)
        if (key + KEYS <= whole) & (shape.WINDOW == 0):
            p, m_i, alpha = weights_of(s, m_i, q_pos, key, past, scale, softcap, False, shape)
        else:
            p, m_i, alpha = weights_of(s, m_i, q_pos, key, past, scale, softcap, True, shape)
        weights = _give(p, m_i, c, rooms, shape)
        l_i = l_i * alpha + gl.sum(p, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        rooms.release(c - 1, W)
        acc = _add_own(acc, weights, alpha, c, rooms, shape, W)
        c += 2
    if (begin < past) & (c == end):  # the last tile is the other group's
        acc, m_i, l_i = _issue_other(acc, m_i, l_i, c - 1, rooms, shape, W)
        acc = warpgroup_mma_wait(0, deps=[acc])
        rooms.release(c - 1, W)
    return acc, m_i, l_i, end


@gluon.jit
def _sums_of_both(l_i, turn, rooms, W: gl.constexpr):
    """Sums of an item, of which each group has those of its tiles."""
    rooms.sums.index(W).store(l_i)
    mbarrier.arrive(rooms.summed.index(W), count=1)
    mbarrier.wait(rooms.summed.index(1 - W), turn & 1)
    return l_i + rooms.sums.index(1 - W).load(l_i.type.layout)


@gluon.jit
def _attend_items(
    query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape,
    W: gl.constexpr,
):  # fmt: skip
    """The program's items. The first group loads queries, and writes what there is once of a row."""
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    gdc_launch_dependents()
    part = gl.program_id(0) % shape.PARTS
    program, programs = gl.program_id(0) // shape.PARTS, gl.num_programs(0) // shape.PARTS
    at, end, total, seq, base = step.range_of(program, programs, shape, WARPS)
    c = 0
    turn = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            ROW: gl.constexpr = gl.SliceLayout(1, shape.LOGITS)
            if W == 0:
                mbarrier.wait(rooms.left, (turn & 1) ^ 1)
                load_queries(query, sq_t, sq_h, item, part, rooms, shape)
                rooms.scales.store(gl.full([shape.ROWS], scale, gl.float32, ROW))
                mbarrier.arrive(rooms.queries, count=1)
            else:
                mbarrier.wait(rooms.queries, turn & 1)
            q_row, _, _ = item.rows(gl.arange(0, shape.ROWS, ROW), part, shape)
            begin, past = item.key_range(at, stop)
            q_pos = item.seq_len - item.q_len + q_row
            acc, m_i, l_i, c = _attend_tiles(item, begin, past, c, q_pos, softcap, rooms, shape, W)
            l_i = _sums_of_both(l_i, turn, rooms, W)
            whole = (item.origin == at) & (stop == item.close)
            state = None
            if splits is not None:
                state = state_of(item, at, states, shape)
            if W == 0:
                if splits is not None:
                    if item.origin == at:
                        note_splits(item, part, programs, total, splits, max_tokens, ROW, shape)
                write_sums(m_i, l_i, item, part, whole, state, lse_out, results.sl_t, shape)
            if whole:
                acc = times(acc, 1.0 / gl.where(l_i == 0, 1.0, l_i), shape)
                finish(acc, W, item, part, results, rooms, shape)
            else:
                if splits is not None:
                    publish(acc, W, item, part, state, shape)
            thread_barrier()  # the next item's queries are not stored before
            if W == 1:
                mbarrier.arrive(rooms.left, count=1)
            turn += 1
        at = stop


@gluon.jit
def first(query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape):
    _attend_items(
        query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape, 0
    )  # fmt: skip


@gluon.jit
def second(query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape):
    _attend_items(
        query, sq_t, sq_h, scale, softcap, lse_out, splits, states, max_tokens, results, rooms, step, shape, 1
    )  # fmt: skip
