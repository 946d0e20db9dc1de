"""Gluon: a computing warpgroup of prefill on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ..gluon_device import LN2, LOG2E, tanh
from ..gluon_names import thread_barrier
from .queries import cast_queries, split_queries
from .split_kv import publish
from .work_item import ROWS, last_seen, output_layout, take, tiles_of


@aggregate
class Output:
    """Where results go: out [T, Hq, D] and, where wanted, lse [T, Hq]."""

    out: gl.tensor
    so_t: gl.tensor
    so_h: gl.tensor
    sl_t: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, so_t, so_h, sl_t):
        self.out, self.so_t, self.so_h, self.sl_t = out, so_t, so_h, sl_t


@gluon.jit
def _logits(q, k, shape):
    """Begin a tile's logits [64, BLOCK_N]: of queries that are a sum of two, or of the parts of a head; of int8, whole
    numbers."""
    if shape.CODES == "int8":
        keys = k[0].permute((1, 0))
        s = gl.zeros([ROWS, shape.BLOCK_N], gl.int32, shape.S_LAYOUT)
        s = warpgroup_mma(q[0], keys, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s]) << 8
        return warpgroup_mma(q[1], keys, s, is_async=True)
    else:
        s = gl.zeros([ROWS, shape.BLOCK_N], gl.float32, shape.S_LAYOUT)
        for i in gl.static_range(len(q)):
            part = k[i % len(k)].permute((1, 0))
            s = warpgroup_mma(q[i], part, s, use_acc=i > 0, is_async=True)
        return s


@gluon.jit
def _begin_outputs(p, v, acc, shape):
    """Begin weights [64, BLOCK_N] times the parts of a tile of values."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=shape.O_LAYOUT, k_width=2)
    weights = gl.convert_layout(p.to(shape.V_DTYPE), P_LAYOUT)
    outputs = (warpgroup_mma(weights, v[0], acc[0], is_async=True),)
    if shape.MORE_V > 0:
        parent: gl.constexpr = acc[1].type.layout
        weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2), True)
        outputs = outputs + (warpgroup_mma(weights, v[1], acc[1], is_async=True),)  # noqa: RUF005
    return outputs


@gluon.jit
def _end_outputs(outputs, shape):
    """Wait for what `_begin_outputs` began."""
    if shape.MORE_V > 0:
        return warpgroup_mma_wait(0, deps=[outputs[0], outputs[1]])
    else:
        return (warpgroup_mma_wait(0, deps=[outputs[0]]),)


@gluon.jit
def _rescale(acc, alpha):
    """Outputs times a factor of each row."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc[i].type.layout))
        scaled = scaled + (acc[i] * gl.expand_dims(factor, 1),)  # noqa: RUF005
    return scaled


@gluon.jit
def _times_scales(s, c, of_keys, shape):
    """Logits [64, BLOCK_N] of keys that have a scale or factor each, times those; and the unit of the tile's values, an
    exponent of two."""
    if shape.TOKEN_SCALES:
        stage = c % of_keys.of_keys.shape[0]
        scales = of_keys.of_keys.index(stage).load(gl.SliceLayout(0, shape.S_LAYOUT))
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        unit = gl.max(of_keys.units.index(stage).slice(0, 1).load(one), 0)
        return s.to(gl.float32) * gl.expand_dims(scales, 0), unit
    elif shape.KEY_SCALES:
        scales = of_keys.index(c % of_keys.shape[0]).load(gl.SliceLayout(0, shape.S_LAYOUT))
        return s * gl.expand_dims(scales, 0), 0.0
    else:
        return s, 0.0


@gluon.jit
def _tile_factor(tile_scales, tile, shape):
    """A factor of a tile's logits; asked for while products run, so that nothing waits for it."""
    if shape.TILE_SCALES:
        return gl.load(tile_scales + tile)
    else:
        return 1.0


@gluon.jit
def _scale_of(qk_scale, factor, shape):
    """What a tile's logits are multiplied with: a number, or one of each row."""
    if shape.TILE_SCALES:
        return gl.maximum(qk_scale * factor, 2.0**-126)  # 0 times a masked logit would be NaN
    else:
        return qk_scale


@gluon.jit
def _softmax(s, m_i, q_pos, tile, keys, qk_scale, softcap, MASKED: gl.constexpr, shape):
    """Weights of a tile's logits [64, BLOCK_N], the factor for what was summed before, the new maximum. q_pos: as
    `_begin` has it."""
    scale = qk_scale
    if shape.ROW_SCALES:
        scale = gl.expand_dims(qk_scale, 1)
    if shape.SOFTCAP:
        # The cap is a factor of what is masked, as the scale is: else the compiler would fuse it into the subtraction
        # below where nothing is masked, and a row's bits would depend on which tiles its neighbours see whole.
        s = tanh(s * (scale / (softcap * LOG2E)))
        qk_scale = softcap * LOG2E
        scale = qk_scale
    if MASKED:
        key = gl.expand_dims(gl.arange(0, shape.BLOCK_N, gl.SliceLayout(0, s.type.layout)), 0)
        start = tile * shape.BLOCK_N
        last = q_pos  # the last key that a row sees
        if not shape.CAUSAL:
            last = q_pos * 0 + keys - 1
            if shape.WINDOW > 0:
                last = gl.minimum(q_pos + (shape.WINDOW - 1), keys - 1)
        visible = key <= gl.expand_dims(last - start, 1)
        if shape.WINDOW > 0:
            visible = visible & (key > gl.expand_dims(q_pos - start - shape.WINDOW, 1))
        if shape.FIRST > 0:
            visible = visible & (key >= shape.FIRST - start)
        s = gl.where(visible, s, -float("inf"))
    top = gl.maximum(m_i, gl.max(s, 1) * qk_scale)
    shift = top
    if MASKED:
        shift = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s * scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m_i - shift)
    return p, alpha, top


@gluon.jit
def _sums(p, shape):
    """Of each row, [64, 4]: what each of the four threads that share a row holds, so that none waits for another."""
    return gl.sum(gl.sum(p.reshape([ROWS, shape.BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _grow(l_i, alpha, p, shape):
    """The running sums after a tile's weights p."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))
    return l_i * gl.expand_dims(factor, 1) + _sums(p, shape)


@gluon.jit
def _steps(p, acc, m_i, l_i, unit, c, high, low, rows, of_keys, softcap, pin, channels, MASKED: gl.constexpr, shape):
    """Tiles high - 1 down to low. Q K of each runs beside P V of the one before, whose weights `p` come in."""
    q, q_pos, keys, qk_scale = rows
    for back in range(0, high - low):
        channels.k.wait_full(c)
        qk = _logits(q, channels.k.parts(c), shape)
        channels.v.wait_full(c - 1)
        pv = _begin_outputs(p, channels.v.parts(c - 1), acc, shape)
        factor = _tile_factor(of_keys, high - 1 - back, shape)
        s, next_unit = _times_scales(warpgroup_mma_wait(len(pv), deps=[qk]), c, of_keys, shape)
        scale = _scale_of(qk_scale, factor, shape)
        p, alpha, m_i = _softmax(s, m_i, q_pos, high - 1 - back, keys, scale, softcap, MASKED, shape)
        l_i = _grow(l_i, alpha, p, shape)
        # It is not read. But the release's barrier stays behind a store, and the store behind the softmax; without it
        # ptxas moves the wait for P V and the release ahead of the softmax that should run beside P V.
        pin.store(l_i.to(pin.dtype))
        acc = _end_outputs(pv, shape)
        channels.release(c)
        if shape.TOKEN_SCALES:
            alpha *= gl.exp2(unit - next_unit)
        unit = next_unit
        acc = _rescale(acc, alpha)
        c += 1
    return p, acc, m_i, l_i, unit, c


@gluon.jit
def _begin(item, w: gl.constexpr, sinks, shape):
    """Positions of a fresh item's rows, or of earlier blocks the last keys that they see, their maximum, and what a
    sink adds to their sum."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, shape.S_LAYOUT)
    row = w * ROWS + gl.arange(0, ROWS, S_ROWS)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, S_ROWS)
    sink = gl.zeros([ROWS], gl.float32, S_ROWS)
    if sinks is not None:
        exists = row % shape.PACK < shape.HEADS
        logit = gl.load(sinks + item.head * shape.HEADS + row % shape.PACK, mask=exists, other=0.0).to(gl.float32)
        # Rounded here. Fused into a subtraction behind it, it would be so in an item's first tile alone, and a row's
        # bits would depend on whether that is the first one that it sees.
        factor = gl.full_like(logit, LOG2E)
        m_i = gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [logit, factor], gl.float32, True, 1)
        if shape.SPLIT_KV:
            m_i = gl.where(item.nth == 0, m_i, -float("inf"))
        sink = gl.where(m_i == -float("inf"), 0.0, 1.0)
    return last_seen(item.first + row // shape.PACK, shape), m_i, sink


@gluon.jit
def _exists(row, item, shape):
    """Whether rows of an item are of its tokens, and of heads of its group."""
    exists = row // shape.PACK < item.tokens
    if shape.HEADS < shape.PACK:
        exists = exists & (row % shape.PACK < shape.HEADS)
    return exists


@gluon.jit
def _finish(acc, m_i, l_i, item, w: gl.constexpr, rooms, of_values, output, lse_out, shape):
    """Store an item's rows; those past its tokens are other sequences'. rooms: the parts of its queries' tile."""
    if lse_out is not None:
        row = w * ROWS + gl.arange(0, ROWS, m_i.type.layout)
        place = (item.token + row // shape.PACK).to(gl.int64) * output.sl_t + item.head * shape.HEADS + row % shape.PACK
        lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
        gl.store(lse_out + place, lse, mask=_exists(row, item, shape))
    v_scale, s_vscale, factor = of_values
    if v_scale is not None:
        factor = factor * gl.load(v_scale + item.head // shape.PACKS * s_vscale)
    acc = _rescale(acc, factor / gl.where(l_i == 0, 1.0, l_i))
    for i in gl.static_range(len(acc)):
        _store(acc[i], i * shape.D, item, w, rooms[i], output, shape)
    fence_async_shared()


@gluon.jit
def _store(rows, begin: gl.constexpr, item, w: gl.constexpr, room, output, shape):
    """Columns of outputs from `begin` on. Of 16 bits by way of shared memory, to have 16 bytes a thread: as the
    products leave them, threads hold 4, and half of every sector would be written twice. Of float32 they hold a quarter
    of a sector each."""
    WIDTH: gl.constexpr = rows.shape[1]
    ROUNDED: gl.constexpr = output.out.dtype.element_ty != gl.float32
    if ROUNDED:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        room.store(rows.to(shape.DTYPE))
        thread_barrier()
        result = room.load(WIDE)
    else:
        WIDE: gl.constexpr = rows.type.layout
        result = rows
    row = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    at = (item.head * shape.HEADS + row % shape.PACK).to(gl.int64)
    place = (item.token + row // shape.PACK).to(gl.int64) * output.so_t + at * output.so_h
    dim = begin + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    keep = gl.expand_dims(_exists(row, item, shape), 1)
    if begin + WIDTH > shape.DIM_V:
        keep = keep & gl.expand_dims(dim < shape.DIM_V, 0)
    gl.store(output.out + gl.expand_dims(place, 1) + gl.expand_dims(dim, 0), result, mask=keep)


@gluon.jit
def _skip(item, c, channels, shape):
    """Leave an item's tiles to the other consumer: none of its rows are this one's."""
    low, _, _, high = tiles_of(item, shape)
    for _ in range(0, high - low):
        channels.k.wait_full(c)
        channels.release(c)
        channels.v.wait_full(c)  # or a later wait for this stage could take the phase before for the one it wants
        c += 1
    return c


@gluon.jit
def consume(w: gl.constexpr, qk_scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape):
    """Attention of 64 rows of every item handed out; w says which half. of_keys, of_values: scales of a call, or None,
    and their strides by head; of values also one that the host knows. TOKEN_SCALES: in the place of keys'
    `scale_planes.ScaleRooms`, KEY_SCALES: of each stage, [STAGES, BLOCK_N] in shared memory; TILE_SCALES lie as
    [B, Hkv, tiles], with strides by head and by sequence."""
    queries = channels.q1 if w else channels.q0
    pin = channels.pins.index(w % channels.pins.shape[0])
    n = 0  # items begun
    c = 0  # tiles whose logits are known
    item = take(channels.items, n, 4, shape)
    while item.live > 0:
        queries.wait_full(n)
        if (w == 1) & (item.tokens <= ROWS // shape.PACK):
            c = _skip(item, c, channels, shape)
            queries.release(n)
            n += 1
            item = take(channels.items, n, 4, shape)
        else:
            keys = item.keys
            logit_scale = qk_scale
            k_scale, s_kscale = of_keys[0], of_keys[1]
            if shape.TILE_SCALES:
                k_scale += item.head // shape.PACKS * s_kscale + item.seq * of_keys[2]
            elif not (shape.TOKEN_SCALES or shape.KEY_SCALES) and k_scale is not None:
                # Keys times their scale: as their logits times it.
                logit_scale = qk_scale * gl.load(k_scale + item.head // shape.PACKS * s_kscale)
            low, whole_low, whole_high, high = tiles_of(item, shape)
            factor = _tile_factor(k_scale, high - 1, shape)
            q_pos, m_i, sink = _begin(item, w, sinks, shape)
            acc = (gl.zeros([ROWS, shape.D], gl.float32, shape.O_LAYOUT),)
            if shape.MORE_V > 0:
                acc = acc + (gl.zeros([ROWS, shape.MORE_V], gl.float32, output_layout(shape.MORE_V)),)  # noqa: RUF005
            channels.k.wait_full(c)
            # Outside the loops: ptxas 12.8 would otherwise set up the addresses that two of them share in the first
            # alone, which may not run.
            rooms = (queries.tile(n).reshape([ROWS, shape.D]),)
            if shape.MORE > 0:
                rooms = rooms + (queries.more[0].index(n % queries.STAGES).reshape([ROWS, shape.MORE]),)  # noqa: RUF005
            q = rooms
            if shape.CODES is not None:
                q, up = split_queries(rooms[0], shape)
                logit_scale *= up
            if shape.CAST_Q:
                cast, up = cast_queries(rooms[0], shape)
                q = (cast,)
                logit_scale *= up
            if shape.ROW_SCALES and not shape.TILE_SCALES:  # of which `_scale_of` makes others
                # 0 times a masked logit would be NaN; a row that is NaN stays so.
                logit_scale = gl.where(logit_scale < 2.0**-126, 2.0**-126, logit_scale)
            qk = _logits(q, channels.k.parts(c), shape)
            s, unit = _times_scales(warpgroup_mma_wait(0, deps=[qk]), c, k_scale, shape)
            channels.release(c)
            c += 1
            scale = _scale_of(logit_scale, factor, shape)
            p, alpha, m_i = _softmax(s, m_i, q_pos, high - 1, keys, scale, softcap, True, shape)
            l_i = _sums(p, shape)
            if sinks is not None:  # one of four parts
                lane = gl.arange(0, 4, gl.SliceLayout(0, l_i.type.layout))
                own = gl.convert_layout(sink * alpha, gl.SliceLayout(1, l_i.type.layout))
                l_i += gl.where(gl.expand_dims(lane, 0) == 0, gl.expand_dims(own, 1), 0.0)
            end = gl.minimum(whole_high, high - 1)
            begin = gl.minimum(whole_low, end)
            rows = (q, q_pos, keys, logit_scale)
            # Tiles that are seen in part are on both sides of those that are seen whole, but of one code: that of each
            # would be read from memory for each item.
            SIDES: gl.constexpr = 2 if shape.WINDOW > 0 or shape.FIRST % shape.BLOCK_N > 0 else 1
            upper, lower = high - 1, end
            for _ in range(0, SIDES):
                p, acc, m_i, l_i, unit, c = _steps(
                    p, acc, m_i, l_i, unit, c, upper, lower, rows, k_scale, softcap, pin, channels, True, shape
                )
                p, acc, m_i, l_i, unit, c = _steps(
                    p, acc, m_i, l_i, unit, c, lower, begin, rows, k_scale, softcap, pin, channels, False, shape
                )
                upper, lower = begin, low  # no more are seen whole
            channels.v.wait_full(c - 1)
            pv = _begin_outputs(p, channels.v.parts(c - 1), acc, shape)
            following = take(channels.items, n + 1, 4, shape)
            acc = _end_outputs(pv, shape)
            l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
            if shape.TOKEN_SCALES:
                acc = _rescale(acc, gl.full_like(m_i, 1.0) * gl.exp2(unit))
            if shape.SPLIT_KV:
                if item.parts > 1:
                    publish(acc, m_i, l_i, workspace, item, w, shape)
                else:
                    _finish(acc, m_i, l_i, item, w, rooms, of_values, output, lse_out, shape)
            else:
                _finish(acc, m_i, l_i, item, w, rooms, of_values, output, lse_out, shape)
            queries.release(n)
            n += 1
            item = following
