"""Gluon: the computing warps of latent attention over rows of codes on Hopper.

All eight share the 128 keys of a tile: first the logits, 16 keys a warp, then, when the weights have passed through
shared memory, the outputs, 64 channels a warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_device import LOG2E, SMALLEST_SCALE, approximate, powers_of_two, tanh
from ..gluon_names import reinterpret, thread_barrier
from .hopper_fp8_operands import (
    KEYS,
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
from .hopper_fp8_rooms import GROUPS, LOAD
from .hopper_items import LATENT, ROPE, range_of_program, visible
from .hopper_states import note_splits, state_of, write_sums

SOME = gl.constexpr(8)  # rows of queries that are loaded at a time


@gluon.jit
def _load_queries(query, sq_t, sq_h, item, part, rooms, shape):
    """An item's rows into shared memory as float16, zeros where there are none, and what logits of each are to be
    multiplied with. Of rows with scales by groups the rotated part stays in the queries' dtype."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for i in gl.static_range(shape.ROWS // SOME):
        row = i * SOME + gl.arange(0, SOME, gl.SliceLayout(1, WIDE))
        q_row, head, exists = item.rows(row, part, shape)
        start = query + gl.expand_dims((item.q_start + q_row).to(gl.int64) * sq_t + head.to(gl.int64) * sq_h, 1)
        mask = gl.expand_dims(exists, 1)
        dim = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, WIDE)), 0)
        latent = gl.load(start + dim, mask=mask, other=0.0).to(gl.float32)
        dim = gl.expand_dims(gl.arange(0, ROPE, gl.SliceLayout(0, WIDE)), 0)
        rope = gl.load(start + LATENT + dim, mask=mask, other=0.0).to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(latent), 1), gl.max(gl.abs(rope), 1))
        down, up = powers_of_two(largest, 15, 32)  # just below float16's largest
        latent = (latent * gl.expand_dims(down, 1)).to(gl.float16)
        rooms.q_latent.slice(i * SOME, SOME).store(in_key_order(latent, PANEL))
        rope = rope * gl.expand_dims(down, 1)
        if shape.GROUPED:
            rooms.q_rope.slice(i * SOME, SOME).store(rope.to(shape.DTYPE))
        else:
            rooms.q_rope.slice(i * SOME, SOME).store(in_key_order(rope.to(gl.float16), ROPE))
        rooms.factors.slice(i * SOME, SOME).store(up)
    fence_async_shared()
    thread_barrier()
    return rooms.factors.load(shape.ROW)


@gluon.jit
def _panel_product(i: gl.constexpr, words, s, rooms, shape):
    """Products of an item's rows with a part of a tile's latent channels, on their way."""
    LAYOUT: gl.constexpr = key_words(PANEL // 4)
    a = key_operand(words.slice(i * (PANEL // 4), PANEL // 4, 1).load(LAYOUT), shape.MMA)
    return warpgroup_mma(a, rooms.q_latent.slice(i * PANEL, PANEL, 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _logits(c, rooms, shape):
    """Products [KEYS, ROWS] of an item's rows with a tile's keys. While a part is multiplied the next is converted."""
    LAYOUT: gl.constexpr = key_words(ROPE // 4)
    words = rooms.words(c)
    s = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    a = key_operand(rooms.rope_words(c).load(LAYOUT), shape.MMA)
    s = warpgroup_mma(a, rooms.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(PANELS):
        s = _panel_product(i, words, s, rooms, shape)
        s = warpgroup_mma_wait(1, deps=[s])  # the registers of the operand before are free
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _scales(c, begin, end, rooms, shape):
    """A tile's scales, a tensor [KEYS] for each group, and the largest of each key. What is left in shared memory are a
    key's scales divided by that; 0 for keys outside begin..end."""
    registers: gl.constexpr = [[0, 1], [0, 2], [8, 0]]
    lanes: gl.constexpr = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [KEYS, GROUPS])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, shape.MMA)
    scales = rooms.scale_rows(c).load(LAYOUT)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    live = (key >= begin) & (key < end)
    largest = gl.where(live, gl.maximum(gl.max(gl.abs(scales), 1), SMALLEST_SCALE), 1.0)
    ratios = scales * gl.expand_dims(approximate("rcp", largest), 1)
    rooms.ratios.permute((1, 0)).store(gl.where(gl.expand_dims(live, 1), ratios, 0.0).to(gl.float16))
    even, odd = gl.split(scales.reshape([KEYS, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    columns = (
        gl.convert_layout(first, OF_KEYS, assert_trivial=True),
        gl.convert_layout(second, OF_KEYS, assert_trivial=True),
        gl.convert_layout(third, OF_KEYS, assert_trivial=True),
        gl.convert_layout(fourth, OF_KEYS, assert_trivial=True),
    )
    return columns, gl.convert_layout(largest, OF_KEYS, assert_trivial=True)


@gluon.jit
def _grouped_logits(c, scales, rooms, shape):
    """The same of rows with scales by groups: products of each group times the keys' scale of it. A group's channels
    are converted in two steps, to have fewer registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.MMA, k_width=2)
    LAYOUT: gl.constexpr = key_words(PANEL // 4)
    HALF: gl.constexpr = PANEL // 2
    nothing = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
    words, q_rope = rooms.words(c), rooms.q_rope.permute((1, 0))
    if shape.DTYPE == gl.bfloat16:
        product = warpgroup_mma(rooms.rope_rows(c), q_rope, nothing, use_acc=False, is_async=True)
    else:
        rope = rooms.rope_rows(c).load(OPERAND).to(shape.DTYPE)
        product = warpgroup_mma(rope, q_rope, nothing, use_acc=False, is_async=True)
    s = nothing
    for i in gl.static_range(PANELS):
        first, second = halves_of(words.slice(i * (PANEL // 4), PANEL // 4, 1).load(LAYOUT))
        operand = key_operand(first, shape.MMA)
        product = warpgroup_mma_wait(0, deps=[product])
        if i == 0:
            s = product
        else:
            s += product * gl.expand_dims(scales[i - 1], 1)
        q = rooms.q_latent.slice(i * PANEL, HALF, 1).permute((1, 0))
        product = warpgroup_mma(operand, q, nothing, use_acc=False, is_async=True)
        q = rooms.q_latent.slice(i * PANEL + HALF, HALF, 1).permute((1, 0))
        product = warpgroup_mma(key_operand(second, shape.MMA), q, product, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    return s + product * gl.expand_dims(scales[PANELS - 1], 1)


@gluon.jit
def _weights(s, m_i, largest, q_pos, key, past, scale, softcap, MASKED: gl.constexpr, shape):
    """Weights of a tile's keys from its logits, the rows' new maximum, and what states so far are multiplied with. With
    scales by groups the maximum is that of exp(logit) * largest scale, so that float16 has their products."""
    scale = gl.expand_dims(scale, 0)
    if shape.SOFTCAP:
        s = tanh(s * (scale / (softcap * LOG2E))) * (softcap * LOG2E)
    else:
        s = s * scale
    if MASKED:
        offs_n = gl.expand_dims(key + gl.arange(0, KEYS, gl.SliceLayout(1, shape.MMA)), 1)
        s = gl.where(visible(q_pos, offs_n, past, 0, shape), s, -float("inf"))
    if shape.GROUPED:
        top = gl.maximum(m_i, gl.max(s + gl.expand_dims(approximate("lg2", largest), 1), 0))
    else:
        top = gl.maximum(m_i, gl.max(s, 0))
    shift = gl.where(top == -float("inf"), 0.0, top)
    return gl.exp2(s - gl.expand_dims(shift, 0)), top, gl.exp2(m_i - shift)


@gluon.jit
def _factors(i: gl.constexpr, rooms):
    """Of the pairs of keys of a part of a tile, what values of each group are multiplied with."""
    LAYOUT: gl.constexpr = factor_words()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PAIRS: gl.constexpr = SOME_KEYS // 2
    words = reinterpret(rooms.ratios, gl.int32, [GROUPS, KEYS // 2], PLAIN)
    some = words.slice(i * PAIRS, PAIRS, 1).permute((1, 0)).load(gl.SliceLayout(2, LAYOUT))
    some, _ = gl.broadcast(gl.expand_dims(some, 2), gl.zeros([PAIRS, PANELS, PANEL // 4], gl.int32, LAYOUT))
    return some


@gluon.jit
def _add_values(acc, c, begin, end, MASKED: gl.constexpr, rooms, shape):
    """Outputs and what a tile's values add to them. A half of the tile is released when its codes are in registers.
    MASKED: values of keys outside begin..end are 0, as their weights are, but 0 * NaN would reach the output."""
    VALUES: gl.constexpr = value_words()
    words = rooms.words(c)
    for i in gl.static_range(KEYS // SOME_KEYS):
        some = words.slice(i * SOME_KEYS, SOME_KEYS).load(VALUES)
        if MASKED:
            key = i * SOME_KEYS + gl.arange(0, SOME_KEYS, gl.SliceLayout(1, VALUES))
            some = gl.where(gl.expand_dims((key >= begin) & (key < end), 1), some, 0)
        factor = None
        if shape.GROUPED:
            factor = _factors(i, rooms)
        a = value_operand(some, factor, shape.MMA)
        weights = rooms.weights.slice(i * SOME_KEYS, SOME_KEYS)
        acc = warpgroup_mma(a, weights, acc, is_async=True)
        if (i + 1) * SOME_KEYS % LOAD == 0:
            rooms.release(c, i * SOME_KEYS // LOAD)
        acc = warpgroup_mma_wait(1, deps=[acc])
    return warpgroup_mma_wait(0, deps=[acc])


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
def _attend_tiles(item, begin, past, c, q_pos, scale, softcap, rooms, shape):
    """The state after keys begin..past, sums by key, and the number of tiles until then."""
    m_i = gl.full([shape.ROWS], -float("inf"), gl.float32, shape.ROW)
    l_i = _sums(gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA))
    acc = gl.zeros([LATENT, shape.ROWS], gl.float32, shape.MMA)
    whole = past  # keys that every row sees end there
    if shape.CAUSAL:
        whole = gl.minimum(past, item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q + 1)
    for key in range(begin, past, KEYS):
        rooms.wait_full(c)
        largest = None
        if shape.GROUPED:
            scales, largest = _scales(c, item.low - key, past - key, rooms, shape)
            s = _grouped_logits(c, scales, rooms, shape)
        else:
            s = _logits(c, rooms, shape)
        if (key + KEYS <= whole) & (shape.WINDOW == 0):
            p, m_i, alpha = _weights(s, m_i, largest, q_pos, key, past, scale, softcap, False, shape)
        else:
            p, m_i, alpha = _weights(s, m_i, largest, q_pos, key, past, scale, softcap, True, shape)
        l_i = _times(l_i, alpha) + _sums(p)
        if shape.GROUPED:
            p = p * gl.expand_dims(largest, 1)
        rooms.weights.store(p.to(gl.float16))
        fence_async_shared()
        thread_barrier()
        acc = acc * gl.expand_dims(alpha, 0)
        if (key + KEYS > past) | (key < item.low):
            acc = _add_values(acc, c, item.low - key, past - key, True, rooms, shape)
        else:
            acc = _add_values(acc, c, 0, KEYS, False, rooms, shape)
        c += 1
    return acc, m_i, gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), shape.ROW), c


@gluon.jit
def _write(acc, factor, item, part, whole, state, out, so_t, so_h, shape):
    """Write an item's outputs, or those of a partial state."""
    acc = in_order(acc * gl.expand_dims(gl.where(whole, factor, 1.0), 0))
    LAYOUT: gl.constexpr = acc.type.layout
    q_row, head, exists = item.rows(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), part, shape)
    row = gl.expand_dims(gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    dim = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(1, LAYOUT)), 1)
    mask = gl.expand_dims(exists, 0)
    if whole:
        place = (item.q_start + q_row).to(gl.int64) * so_t + head.to(gl.int64) * so_h
        gl.store(out + gl.expand_dims(place, 0) + dim, acc.to(out.dtype.element_ty), mask=mask)
    else:
        if state is not None:
            to = state + 2 * shape.ROWS + row * LATENT + dim
            gl.store(to, acc.to(gl.int32, bitcast=True), mask=mask)


@gluon.jit
def attend(
    query, sq_t, sq_h, scale, out_scale, softcap, k_scale, out, so_t, so_h, lse_out, sl_t, splits, states, max_tokens,
    rooms, step, shape,
):  # fmt: skip
    """The program's items."""
    gdc_wait()  # nothing is read, and no place of the workspace written, before what came before is done
    gdc_launch_dependents()
    if k_scale is not None:  # codes times their scale: logits and sums times it
        scale *= gl.load(k_scale)
        out_scale *= gl.load(k_scale)
    part = gl.program_id(0) % shape.PARTS
    at, end, seq, base, total, programs = range_of_program(step, shape, WARPS)
    c = 0
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            up = _load_queries(query, sq_t, sq_h, item, part, rooms, shape)
            q_row, _, _ = item.rows(gl.arange(0, shape.ROWS, shape.ROW), part, shape)
            begin, past = item.key_range(at, stop)
            q_pos = item.seq_len - item.q_len + q_row
            acc, m_i, l_i, c = _attend_tiles(item, begin, past, c, q_pos, up * scale, softcap, rooms, shape)
            if not shape.GROUPED:
                acc = acc * out_scale
            whole = (item.origin == at) & (stop == item.close)
            state = None
            if splits is not None:
                state = state_of(item, at, states, shape)
                if item.origin == at:
                    note_splits(item, part, programs, total, splits, max_tokens, shape.ROW, shape)
            write_sums(m_i, l_i, item, part, whole, state, lse_out, sl_t, shape)
            factor = 1.0 / gl.where(l_i == 0, 1.0, l_i)
            _write(acc, factor, item, part, whole, state, out, so_t, so_h, shape)
            thread_barrier()  # the next item's queries are not stored before
        at = stop
