"""Gluon: the two computing warpgroups of latent attention over rows of codes on Hopper.

They take tiles by turns, each with a state of its own, so that one converts and multiplies while the other is at its
softmax. Of a tile first the logits, 16 keys a warp, then, when the weights have passed through shared memory, the
outputs, in two halves of the channels. At the end of an item either adds up one half of both states.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_device import LOG2E, SMALLEST_SCALE, approximate, bits, powers_of_two, tanh
from ..gluon_e4m3 import two_e4m3
from ..gluon_names import reinterpret, thread_barrier
from .hopper_fp8_operands import (
    PANEL,
    PANELS,
    SOME_KEYS,
    WARPS,
    factor_words,
    halves_of,
    in_key_order,
    in_order,
    key_operand,
    key_words,
    value_operand,
    value_words,
)
from .hopper_fp8_rooms import GROUPS
from .hopper_fp8_totals import total
from .hopper_items import HALF, KEYS, LATENT, ROPE, range_of_program, visible
from .hopper_states import note_splits, state_of, write_sums

# By how much, as an exponent of two, a logit is above what states are multiples of, before these are raised to it: the
# bits of 8.0. What they are multiples of before any key: -inf less it is -inf.
_RAISED_BITS = gl.constexpr(0x41000000)
_LEAST = gl.constexpr(-(2.0**127))


@gluon.constexpr_function
def _rope_layout(rows):
    """Of rotated parts [rows, ROPE]: a row is in the warp that has its latent part, once."""
    lanes = [[0, 8], [0, 16], [0, 32], [4, 0], [8, 0] if rows > 8 else [0, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], lanes, [[1, 0], [2, 0]], [], [rows, ROPE.value])


@gluon.jit
def _part_of_rows(query, sq_t, sq_h, item, part, FIRST: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, shape):
    """Elements of an item's rows from row FIRST on, float32, zeros where there are none."""
    q_row, head, exists = item.rows(FIRST + gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT)), part, shape)
    start = (item.q_start + q_row).to(gl.int64) * sq_t + head.to(gl.int64) * sq_h
    dim = gl.expand_dims(gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(query + gl.expand_dims(start, 1) + dim, mask=gl.expand_dims(exists, 1), other=0.0).to(gl.float32)


@gluon.jit
def _store_codes(room, x, down, FIRST: gl.constexpr):
    """Rows times powers of two as two e4m3, the smaller first."""
    low, high = two_e4m3(x, down + gl.zeros_like(x))
    room.index(0).slice(FIRST, x.shape[0]).store(low)
    room.index(1).slice(FIRST, x.shape[0]).store(high)


@gluon.jit
def _load_queries(w: gl.constexpr, query, sq_t, sq_h, scale, item, part, n, rooms, shape):
    """A warpgroup's half of an item's rows into shared memory as float16, or as two e4m3, and what logits of each are
    to be multiplied with. Of rows with scales by groups the rotated part stays in the queries' dtype."""
    SOME: gl.constexpr = shape.ROWS // 2
    FIRST: gl.constexpr = w * SOME
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = _rope_layout(SOME)
    latent = _part_of_rows(query, sq_t, sq_h, item, part, FIRST, [SOME, LATENT], WIDE, shape)
    rope = _part_of_rows(query + LATENT, sq_t, sq_h, item, part, FIRST, [SOME, ROPE], NARROW, shape)
    largest = gl.convert_layout(gl.max(gl.abs(rope), 1), gl.SliceLayout(1, WIDE))
    largest = gl.maximum(gl.max(gl.abs(latent), 1), largest)
    down, up = powers_of_two(largest, 7 if shape.CODE_PRODUCTS else 15, 32)  # just below the dtype's largest
    of_rope = gl.expand_dims(gl.convert_layout(down, gl.SliceLayout(1, NARROW)), 1)
    down = gl.expand_dims(down, 1)
    if shape.CODE_PRODUCTS:
        up = gl.where(largest == float("inf"), float("nan"), up)  # e4m3 has no infinity
        _store_codes(rooms.query_codes(0, shape.ROWS), latent, down, FIRST)
    else:
        rooms.q_latent.index(0).slice(FIRST, SOME).store(in_key_order((latent * down).to(gl.float16), PANEL))
    if shape.GROUPED:
        rooms.q_rope.slice(FIRST, SOME).store((rope * of_rope).to(shape.DTYPE))
    elif shape.CODE_PRODUCTS:
        _store_codes(rooms.query_rope_codes(shape.ROWS), rope, of_rope, FIRST)
    else:
        rooms.q_rope.slice(FIRST, SOME).store(in_key_order((rope * of_rope).to(gl.float16), ROPE))
    rooms.factors.slice(FIRST, SOME).store(up * scale)
    fence_async_shared()
    return rooms.meet(n)


@gluon.jit
def _zero(c):
    """0, which the compiler does not know: else it keeps the places of all parts of the queries, for which there are no
    registers."""
    return c >> 28


@gluon.jit
def _logits(c, rooms, shape):
    """Products [KEYS, ROWS] of an item's rows with a tile's keys. Codes are read a part ahead, and while a part is
    multiplied the next is converted."""
    LAYOUT: gl.constexpr = key_words(ROPE // 4)
    PANEL_LAYOUT: gl.constexpr = key_words(PANEL // 4)
    HALF_PANEL: gl.constexpr = PANEL // 2
    words = rooms.words(c)
    q_latent = rooms.q_latent.index(_zero(c))
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    rope = rooms.rope_words(c).load(LAYOUT)
    some = words.slice(0, PANEL // 4, 1).load(PANEL_LAYOUT)
    a = key_operand(rope, shape.MMA)
    s = warpgroup_mma(a, rooms.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(PANELS):
        first, second = halves_of(some)
        a = key_operand(first, shape.MMA)
        if i + 1 < PANELS:
            some = words.slice((i + 1) * (PANEL // 4), PANEL // 4, 1).load(PANEL_LAYOUT)
        q = q_latent.slice(i * PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the registers of the operand before are free
        a = key_operand(second, shape.MMA)
        q = q_latent.slice(i * PANEL + HALF_PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _code_logits(c, rooms, shape):
    """The same of keys as they are stored, by queries that are the sum of two e4m3."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.CODE_MMA, k_width=4)
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.CODE_MMA)
    q_latent, q_rope = rooms.query_codes(_zero(c), shape.ROWS), rooms.query_rope_codes(shape.ROWS)
    keys = rooms.key_codes(c)
    rope = rooms.rope_codes(c).load(OPERAND)
    codes = keys.slice(0, PANEL, 1).load(OPERAND)
    s = _both_parts(rope, q_rope, 0, s)
    for i in gl.static_range(PANELS):
        a = codes
        if i + 1 < PANELS:
            codes = keys.slice((i + 1) * PANEL, PANEL, 1).load(OPERAND)
        s = _both_parts(a, q_latent, i * PANEL, s)
    return gl.convert_layout(warpgroup_mma_wait(0, deps=[s]), shape.MMA, assert_trivial=True)


@gluon.jit
def _both_parts(a, q, at: gl.constexpr, s):
    """Products of codes [KEYS, n] with channels from `at` on of queries of two parts [2, ROWS, ..], added; those before
    are done."""
    s = warpgroup_mma(a, q.index(0).slice(at, a.shape[1], 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(a, q.index(1).slice(at, a.shape[1], 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(2, deps=[s])


@gluon.constexpr_function
def _scale_layout(count):
    """Of scales [KEYS, count], a thread's those of the keys whose logits it has."""
    registers = [*([0, 1 << i] for i in range(bits(count))), [8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [KEYS.value, count])


@gluon.jit
def _largest_scales(w: gl.constexpr, c, begin, end, rooms, shape):
    """The largest scale of each key of a tile, [KEYS]. What is left in shared memory are a key's scales divided by
    that; 0 for keys outside begin..end."""
    LAYOUT: gl.constexpr = _scale_layout(GROUPS)
    scales = rooms.scale_rows(c).load(LAYOUT)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    live = (key >= begin) & (key < end)
    largest = gl.where(live, gl.maximum(gl.max(gl.abs(scales), 1), SMALLEST_SCALE), 1.0)
    ratios = scales * gl.expand_dims(approximate("rcp", largest), 1)
    ratios = gl.where(gl.expand_dims(live, 1), ratios, 0.0).to(gl.float16)
    rooms.ratios.index(w).permute((1, 0)).store(ratios)
    return gl.convert_layout(largest, gl.SliceLayout(1, shape.MMA), assert_trivial=True)


@gluon.jit
def _scale_column(i: gl.constexpr, c, rooms, shape):
    """The scales of a group, [KEYS, 1], that can be divided by."""
    scales = rooms.scale_rows(c).slice(i, 1, 1).load(_scale_layout(1)).reshape([KEYS])
    scales = gl.where(gl.abs(scales) < SMALLEST_SCALE, SMALLEST_SCALE, scales)
    return gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(1, shape.MMA), assert_trivial=True), 1)


@gluon.jit
def _grouped_logits(c, rooms, shape):
    """The same of rows with scales by groups. While a group is multiplied sums are multiples of the keys' scale of it:
    one accumulator for all of them."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.MMA, k_width=2)
    LAYOUT: gl.constexpr = key_words(PANEL // 4)
    HALF_PANEL: gl.constexpr = PANEL // 2
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    words, q_rope, q_latent = rooms.words(c), rooms.q_rope.permute((1, 0)), rooms.q_latent.index(_zero(c))
    if shape.DTYPE == gl.bfloat16:
        s = warpgroup_mma(rooms.rope_rows(c), q_rope, s, use_acc=False, is_async=True)
    else:
        rope = rooms.rope_rows(c).load(OPERAND).to(shape.DTYPE)
        s = warpgroup_mma(rope, q_rope, s, use_acc=False, is_async=True)
    some = words.slice(0, PANEL // 4, 1).load(LAYOUT)
    unit = 1.0
    for i in gl.static_range(PANELS):
        first, second = halves_of(some)
        a = key_operand(first, shape.MMA)
        if i + 1 < PANELS:
            some = words.slice((i + 1) * (PANEL // 4), PANEL // 4, 1).load(LAYOUT)
        column = _scale_column(i, c, rooms, shape)
        s = warpgroup_mma_wait(0, deps=[s])
        s *= unit * approximate("rcp", column)
        unit = column
        q = q_latent.slice(i * PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
        a = key_operand(second, shape.MMA)
        q = q_latent.slice(i * PANEL + HALF_PANEL, HALF_PANEL, 1).permute((1, 0))
        s = warpgroup_mma(a, q, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s]) * unit


@gluon.jit
def _grouped_code_logits(c, rooms, shape):
    """Both: by groups, of keys as they are stored."""
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    s = warpgroup_mma(rooms.rope_rows(c), rooms.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.CODE_MMA, k_width=4)
    q_latent, keys = rooms.query_codes(_zero(c), shape.ROWS), rooms.key_codes(c)
    unit = 1.0
    for i in gl.static_range(PANELS):
        column = _scale_column(i, c, rooms, shape)
        a = keys.slice(i * PANEL, PANEL, 1).load(OPERAND)
        s = warpgroup_mma_wait(0, deps=[s])
        s *= unit * approximate("rcp", column)
        unit = column
        s = gl.convert_layout(s, shape.CODE_MMA, assert_trivial=True)
        s = _both_parts(a, q_latent, i * PANEL, s)
        s = gl.convert_layout(s, shape.MMA, assert_trivial=True)
    return warpgroup_mma_wait(0, deps=[s]) * unit


@gluon.jit
def _scaled(s, softcap, rooms, shape):
    """Logits, as exponents of two, of products with queries."""
    scale = gl.expand_dims(rooms.factors.load(shape.ROW), 0)
    if shape.SOFTCAP:
        return tanh(s * (scale / (softcap * LOG2E))) * (softcap * LOG2E)
    else:
        return s * scale


@gluon.jit
def _masked(s, item, part, key, past, shape):
    """Logits of a tile that begins with a key, -inf of keys that a row does not see."""
    q_row, _, _ = item.rows(gl.arange(0, shape.ROWS, shape.ROW), part, shape)
    offs_n = gl.expand_dims(key + gl.arange(0, KEYS, gl.SliceLayout(1, shape.MMA)), 1)
    return gl.where(visible(item.seq_len - item.q_len + q_row, offs_n, past, 0, shape), s, -float("inf"))


@gluon.jit
def _store_weights(w: gl.constexpr, p, largest, rooms, shape):
    if shape.GROUPED:
        p = p * gl.expand_dims(largest, 1)
    rooms.weights.index(w).store(p.to(gl.float16))
    fence_async_shared()


@gluon.jit
def _weights(w: gl.constexpr, s, largest, low, high, l_i, rooms, shape):
    """Weights of a tile's keys from its logits, left in shared memory, and states with them: as multiples of a number
    for each row, which is raised only where a logit is RAISED above it. With scales by groups that is of
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
    if gl.max(rooms.excess.index(w).load(EVERY), 0) > _RAISED_BITS:
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
    rooms.release(c)  # behind all warps' products, which read weights that the next tile's replace
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
    rooms.sums.index(2 * w).store(gl.full([shape.ROWS], _LEAST, gl.float32, shape.ROW))
    thread_barrier()
    for key in range(begin + first * KEYS, past, 2 * KEYS):
        rooms.wait_full(c)
        largest = None
        if shape.GROUPED:
            largest = _largest_scales(w, c, item.low - key, past - key, rooms, shape)
            if shape.CODE_PRODUCTS:
                s = _grouped_code_logits(c, rooms, shape)
            else:
                s = _grouped_logits(c, rooms, shape)
        elif shape.CODE_PRODUCTS:
            s = _code_logits(c, rooms, shape)
        else:
            s = _logits(c, rooms, shape)
        words = _some_values(0, c, rooms)
        s = _scaled(s, softcap, rooms, shape)
        if (key + KEYS > whole) | (shape.WINDOW > 0):
            s = _masked(s, item, part, key, past, shape)
        low, high, l_i = _weights(w, s, largest, low, high, l_i, rooms, shape)
        if (key + KEYS > past) | (key < item.low):
            low, high = _add_values(w, low, high, words, c, item.low - key, past - key, True, rooms, shape)
        else:
            low, high = _add_values(w, low, high, words, c, 0, KEYS, False, rooms, shape)
        c += 2
    m_i = rooms.sums.index(2 * w).load(shape.ROW)
    m_i = gl.where(m_i == _LEAST, -float("inf"), m_i)
    return low, high, m_i, gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), shape.ROW), after


@gluon.jit
def _write(acc, factor, w: gl.constexpr, item, part, whole, state, results, shape):
    """Write a warpgroup's half of an item's outputs, or of those of a partial state."""
    acc = in_order(acc * gl.expand_dims(gl.where(whole, factor, 1.0), 0))
    LAYOUT: gl.constexpr = acc.type.layout
    q_row, head, exists = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), part, shape)
    row = gl.expand_dims(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    dim = w * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)), 1)
    mask = gl.expand_dims(exists, 0)
    if whole:
        place = (item.q_start + q_row).to(gl.int64) * results.so_t + head.to(gl.int64) * results.so_h
        outputs = acc.to(results.out.dtype.element_ty)
        gl.store(results.out + gl.expand_dims(place, 0) + dim, outputs, mask=mask)
    else:
        if state is not None:
            to = state + 2 * shape.ROWS + row * LATENT + dim
            gl.store(to, acc.to(gl.int32, bitcast=True), mask=mask)


@gluon.jit
def attend(w: gl.constexpr, of_query, of_states, results, rooms, step, shape):
    """The w-th warpgroup's part of the program's items."""
    query, sq_t, sq_h, scale, out_scale, softcap, k_scale = of_query
    lse_out, splits, states, max_tokens = of_states
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    gdc_launch_dependents()
    if k_scale is not None:  # codes times their scale: logits and sums times it
        scale *= gl.load(k_scale)
        out_scale *= gl.load(k_scale)
    part = gl.program_id(0) % shape.PARTS
    at, end, seq, base, all_tiles, programs = range_of_program(step, shape, WARPS)
    c = 0
    n = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            n = _load_queries(w, query, sq_t, sq_h, scale, item, part, n, rooms, shape)
            begin, past = item.key_range(at, stop)
            low, high, m_i, l_i, c = _attend_tiles(w, item, begin, past, c, part, softcap, rooms, shape)
            acc, m_i, l_i, n = total(w, low, high, m_i, l_i, n, rooms, shape)
            if not shape.GROUPED:
                acc = acc * out_scale
            whole = (item.origin == at) & (stop == item.close)
            state = None
            if splits is not None:
                state = state_of(item, at, states, shape)
            if w == 0:
                if splits is not None:
                    if item.origin == at:
                        note_splits(item, part, programs, all_tiles, splits, max_tokens, shape.ROW, shape)
                write_sums(m_i, l_i, item, part, whole, state, lse_out, results.sl_t, shape)
            factor = 1.0 / gl.where(l_i == 0, 1.0, l_i)
            _write(acc, factor, w, item, part, whole, state, results, shape)
        at = stop
