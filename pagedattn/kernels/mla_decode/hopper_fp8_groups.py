"""Gluon: the two computing warpgroups of latent attention over rows of codes on Hopper.

They take tiles by turns, each with a state of its own, so that one converts and multiplies while the other is at its
softmax. Of a tile first the logits, 16 keys a warp, then, when the weights have passed through shared memory, the
outputs, in two halves of the channels. At the end of an item each adds up one half of both states.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_device import LEAST, THRESHOLD_BITS, approximate
from ..gluon_names import reinterpret, thread_barrier
from .hopper_fp8_logits import largest_scales, logits_of, masked
from .hopper_fp8_operands import PANEL, SOME_KEYS, WARPS, factor_words, in_order, value_operand, value_words
from .hopper_fp8_outputs import write_or_publish
from .hopper_fp8_queries import load_queries
from .hopper_fp8_rooms import GROUPS
from .hopper_fp8_totals import total
from .hopper_items import HALF, KEYS, range_of_program


@gluon.jit
def _store_weights(w: gl.constexpr, p, largest, rooms, shape):
    if shape.GROUPED:
        p = p * gl.expand_dims(largest, 1)
    rooms.weights.index(w).store(p.to(gl.float16))
    fence_async_shared()


@gluon.jit
def _weights(w: gl.constexpr, s, largest, low, high, l_i, rooms, shape):
    """Weights of a tile's keys from its logits, left in shared memory, and states with them: as multiples of a number
    for each row, which is raised only where a logit is RESCALE_THRESHOLD above it. With scales by groups that is of
    exp(logit) * largest scale, so that float16 has their products."""
    EVERY: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0], [0]], [], [WARPS])
    m_i = rooms.sums.index(2 * w).load(shape.ROW)
    above = s - gl.expand_dims(m_i, 0)
    p = gl.exp2(above)
    _store_weights(w, p, largest, rooms, shape)
    log = 0.0
    if shape.GROUPED:
        log = gl.expand_dims(approximate("lg2", largest), 1)
    most = (above + log).to(gl.int32, bitcast=True)  # where they are not negative in the same order as the numbers
    rooms.excess.index(w).store(gl.max(most.reshape([WARPS, KEYS // WARPS * shape.ROWS]), 1))
    thread_barrier()
    if gl.max(rooms.excess.index(w).load(EVERY), 0) > THRESHOLD_BITS:
        top = gl.maximum(m_i, gl.max(s + log, 0))
        alpha = gl.exp2(m_i - top)
        low = low * gl.expand_dims(alpha, 0)
        high = high * gl.expand_dims(alpha, 0)
        l_i = _times(l_i, alpha)
        rooms.sums.index(2 * w).store(top)
        p = gl.exp2(s - gl.expand_dims(top, 0))
        _store_weights(w, p, largest, rooms, shape)
        thread_barrier()
    return low, high, l_i + _sums(p)


@gluon.jit
def _factors(w: gl.constexpr, step: gl.constexpr, rooms):
    """Of the pairs of keys whose values `_some_values` has, what those of each group are multiplied with."""
    LAYOUT: gl.constexpr = factor_words()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PAIRS: gl.constexpr = SOME_KEYS // 2
    COUNT: gl.constexpr = HALF // PANEL
    words = reinterpret(rooms.ratios.index(w), gl.int32, [GROUPS, KEYS // 2], PLAIN)
    words = words.slice(step % 2 * COUNT, COUNT).slice(step // 2 * PAIRS, PAIRS, 1)
    some = words.permute((1, 0)).load(gl.SliceLayout(2, LAYOUT))
    some, _ = gl.broadcast(gl.expand_dims(some, 2), gl.zeros([PAIRS, COUNT, PANEL // 4], gl.int32, LAYOUT))
    return some


@gluon.jit
def _some_values(step: gl.constexpr, c, rooms):
    """Codes of a part of a tile's keys, half of the channels, by turns the first and the second."""
    VALUES: gl.constexpr = value_words()
    words = rooms.words(c).slice(step // 2 * SOME_KEYS, SOME_KEYS).slice(step % 2 * (HALF // 4), HALF // 4, 1)
    return words.load(VALUES)


@gluon.jit
def _as_operand(words, factors, step: gl.constexpr, begin, end, MASKED: gl.constexpr, shape):
    """Values by `_some_values` as an operand. MASKED: of keys outside begin..end they are 0, as their weights are, but
    0 * NaN would reach the output."""
    if MASKED:
        key = step // 2 * SOME_KEYS + gl.arange(0, SOME_KEYS, gl.SliceLayout(1, words.type.layout))
        words = gl.where(gl.expand_dims((key >= begin) & (key < end), 1), words, 0)
    return value_operand(words, factors, shape.MMA)


@gluon.jit
def _add_values(w: gl.constexpr, low, high, words, c, begin, end, MASKED: gl.constexpr, rooms, shape):
    """Outputs, in halves, and what a tile's values add to them, of which the first are given; codes are read a part
    ahead."""
    STEPS: gl.constexpr = 2 * KEYS // SOME_KEYS
    factors = None
    if shape.GROUPED:
        factors = _factors(w, 0, rooms)
    for step in gl.static_range(STEPS):
        a = _as_operand(words, factors, step, begin, end, MASKED, shape)
        if step + 1 < STEPS:
            words = _some_values(step + 1, c, rooms)
            if shape.GROUPED:
                factors = _factors(w, step + 1, rooms)
        weights = rooms.weights.index(w).slice(step // 2 * SOME_KEYS, SOME_KEYS)
        if step % 2 == 0:
            low = warpgroup_mma(a, weights, low, is_async=True)
            if step > 0:
                high = warpgroup_mma_wait(1, deps=[high])  # the registers of the operand before are free
        else:
            high = warpgroup_mma(a, weights, high, is_async=True)
            low = warpgroup_mma_wait(1, deps=[low])
    high = warpgroup_mma_wait(0, deps=[high])
    rooms.release(c)  # a barrier too: all warps' products have read their weights before the next tile's replace them
    return low, high


@gluon.jit
def _sums(p):
    """Sums of the two keys that a thread has of each row, [WARPS, 8, ROWS]: what is left is added up once per item."""
    return gl.sum(p.reshape([WARPS, 2, KEYS // (2 * WARPS), p.shape[1]]), 1)


@gluon.jit
def _times(sums, factor):
    """Sums by `_sums` times a factor of each row."""
    LAYOUT: gl.constexpr = sums.type.layout
    factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)), assert_trivial=True)
    return sums * gl.expand_dims(gl.expand_dims(factor, 0), 0)


@gluon.jit
def _attend_tiles(w: gl.constexpr, item, begin, past, c, part, softcap, rooms, shape):
    """A warpgroup's state after its tiles of keys begin..past, of which the first is the program's c-th, and the number
    of tiles until then."""
    l_i = _sums(gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA))
    low = gl.zeros([HALF, shape.ROWS], gl.float32, shape.MMA)
    high = gl.zeros([HALF, shape.ROWS], gl.float32, shape.MMA)
    whole = past  # keys that every row sees end there
    if shape.CAUSAL:
        whole = gl.minimum(past, item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q + 1)
    after = c + (gl.maximum(past - begin, 0) + KEYS - 1) // KEYS
    first = (c + w) & 1
    c += first
    rooms.sums.index(2 * w).store(gl.full([shape.ROWS], LEAST, gl.float32, shape.ROW))
    thread_barrier()
    for key in range(begin + first * KEYS, past, 2 * KEYS):
        rooms.wait_full(c)
        largest = None
        if shape.GROUPED:
            largest = largest_scales(w, c, item.low - key, past - key, rooms, shape)
        s = logits_of(c, largest, softcap, rooms, shape)
        words = _some_values(0, c, rooms)
        if (key + KEYS > whole) | (shape.WINDOW > 0):
            s = masked(s, item, part, key, past, shape)
        low, high, l_i = _weights(w, s, largest, low, high, l_i, rooms, shape)
        if (key + KEYS > past) | (key < item.low):
            low, high = _add_values(w, low, high, words, c, item.low - key, past - key, True, rooms, shape)
        else:
            low, high = _add_values(w, low, high, words, c, 0, KEYS, False, rooms, shape)
        c += 2
    m_i = rooms.sums.index(2 * w).load(shape.ROW)
    m_i = gl.where(m_i == LEAST, -float("inf"), m_i)
    return low, high, m_i, gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), shape.ROW), after


@gluon.jit
def attend(w: gl.constexpr, of_query, of_states, results, rooms, step, shape):
    """The w-th warpgroup's part of the program's items."""
    query, sq_t, sq_h, scale, out_scale, softcap, k_scale = of_query
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    gdc_launch_dependents()
    if k_scale is not None:  # codes times their scale: logits and sums times it
        scale *= gl.load(k_scale)
        out_scale *= gl.load(k_scale)
    at, end, seq, base, split = range_of_program(step, shape, WARPS)
    part = split.part
    c = 0
    n = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            n = load_queries(w, query, sq_t, sq_h, scale, item, part, n, rooms, shape)
            begin, past = item.key_range(at, stop)
            low, high, m_i, l_i, c = _attend_tiles(w, item, begin, past, c, part, softcap, rooms, shape)
            acc, m_i, l_i, n = total(w, low, high, m_i, l_i, n, rooms, shape)
            if not shape.GROUPED:
                acc = acc * out_scale
            write_or_publish(w, in_order(acc), m_i, l_i, at, stop, item, split, of_states, results, shape)
        at = stop
