"""Gluon: what a computing warpgroup of prefill on Hopper does with tiles of keys and values: products and softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..gluon_device import LOG2E, tanh
from .work_item import ROWS


@gluon.jit
def _logits(q, k, shape):
    """Begin a tile's logits [64, BLOCK_N]: of queries that are a sum of two, or of the parts of a head."""
    s = gl.zeros([ROWS, shape.BLOCK_N], gl.float32, shape.S_LAYOUT)
    for i in gl.static_range(len(q)):
        s = warpgroup_mma(q[i], k[i % len(k)].permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def begin_outputs(p, v, acc, shape):
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
def end_outputs(outputs, shape):
    """Wait for what `begin_outputs` began."""
    if shape.MORE_V > 0:
        return warpgroup_mma_wait(0, deps=[outputs[0], outputs[1]])
    else:
        return (warpgroup_mma_wait(0, deps=[outputs[0]]),)


@gluon.jit
def rescale(acc, alpha):
    """Outputs times a factor of each row."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc[i].type.layout))
        scaled = scaled + (acc[i] * gl.expand_dims(factor, 1),)  # noqa: RUF005
    return scaled


@gluon.jit
def _times_scales(s, c, of_keys, shape):
    """Logits [64, BLOCK_N] of keys that have a factor each, times those."""
    if shape.KEY_SCALES:
        scales = of_keys.index(c % of_keys.shape[0]).load(gl.SliceLayout(0, shape.S_LAYOUT))
        return s * gl.expand_dims(scales, 0)
    else:
        return s


@gluon.jit
def _tile_factor(of_keys, tile, c, shape):
    """A factor of a tile's logits; asked for while products run, so that nothing waits for it."""
    if shape.TILE_SCALES:
        return gl.load(of_keys + tile)
    elif shape.TOKEN_SCALES:
        return _unit(of_keys, c, 0)
    else:
        return 1.0


@gluon.jit
def _unit(rooms, c, WHICH: gl.constexpr):
    """Of keys the unit of a tile, of values, 1, the exponent of theirs."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(rooms.units.index(c % rooms.units.shape[0]).slice(WHICH, 1).load(ONE), 0)


@gluon.jit
def above_zero(scale):
    """A factor of logits, for 0 times a masked one would be NaN; NaN stays so."""
    return gl.where(scale < 2.0**-126, 2.0**-126, scale)


@gluon.jit
def _scale_of(qk_scale, factor, shape):
    """What a tile's logits are multiplied with: a number, or one of each row."""
    if shape.TILE_SCALES or shape.TOKEN_SCALES:
        return above_zero(qk_scale * factor)
    else:
        return qk_scale


@gluon.jit
def _softmax(s, m_i, q_pos, tile, keys, qk_scale, softcap, masked, shape):
    """Weights of a tile's logits [64, BLOCK_N], the factor for what was summed before, the new maximum. q_pos: as
    `_begin` has it; masked: whether there are keys that a row does not see."""
    scale = qk_scale
    if shape.ROW_SCALES:
        scale = gl.expand_dims(qk_scale, 1)
    if shape.SOFTCAP:
        # The cap is a factor of what is masked, as the scale is: else the compiler would fuse it into the subtraction
        # below where nothing is masked, and a row's bits would depend on which tiles its neighbours see whole.
        s = tanh(s * (scale / (softcap * LOG2E)))
        qk_scale = softcap * LOG2E
        scale = qk_scale
    if masked:
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
    if masked:
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
def _steps(p, acc, m_i, l_i, c, high, low, rows, of_keys, softcap, pin, channels, MASKED: gl.constexpr, shape):
    """Tiles high - 1 down to low. Q K of each runs beside P V of the one before, whose weights `p` come in."""
    q, q_pos, keys, qk_scale = rows
    for back in range(0, high - low):
        channels.k.wait_full(c)
        qk = _logits(q, channels.k.parts(c), shape)
        channels.v.wait_full(c - 1)
        pv = begin_outputs(p, channels.v.parts(c - 1), acc, shape)
        factor = _tile_factor(of_keys, high - 1 - back, c, shape)
        s = _times_scales(warpgroup_mma_wait(len(pv), deps=[qk]), c, of_keys, shape)
        scale = _scale_of(qk_scale, factor, shape)
        p, alpha, m_i = _softmax(s, m_i, q_pos, high - 1 - back, keys, scale, softcap, MASKED, shape)
        l_i = _grow(l_i, alpha, p, shape)
        # It is not read. But the release's barrier stays behind a store, and the store behind the softmax; without it
        # ptxas moves the wait for P V and the release ahead of the softmax that should run beside P V.
        pin.store(l_i.to(pin.dtype))
        acc = end_outputs(pv, shape)
        channels.release(c)
        acc = rescale(acc, alpha)
        c += 1
    return p, acc, m_i, l_i, c


@gluon.jit
def _plus_sink(l_i, sink):
    """Running sums [64, 4] of a row with what its sink adds, in one of four parts."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, l_i.type.layout))
    own = gl.convert_layout(sink, gl.SliceLayout(1, l_i.type.layout))
    return l_i + gl.where(gl.expand_dims(lane, 0) == 0, gl.expand_dims(own, 1), 0.0)


@gluon.jit
def steps_overlapped(acc, m_i, sink, c, tiles, rows, of_keys, SINKS: gl.constexpr, softcap, pin, channels, shape):
    """All tiles of an item but for the last one's P V: its weights come first of what is returned. tiles: as of
    `tiles_of`; sink: what sinks add to the sums."""
    q, q_pos, keys, logit_scale = rows
    low, whole_low, whole_high, high = tiles
    qk = _logits(q, channels.k.parts(c), shape)
    factor = _tile_factor(of_keys, high - 1, c, shape)
    s = _times_scales(warpgroup_mma_wait(0, deps=[qk]), c, of_keys, shape)
    if not shape.KEY_SCALES:
        channels.release(c)
    scale = _scale_of(logit_scale, factor, shape)
    p, alpha, m_i = _softmax(s, m_i, q_pos, high - 1, keys, scale, softcap, True, shape)
    l_i = _sums(p, shape)
    if shape.KEY_SCALES:  # once they are used: a release does not wait for loads, which the next copy would overtake
        pin.store(l_i.to(pin.dtype))
        channels.release(c)
    c += 1
    if SINKS:
        l_i = _plus_sink(l_i, sink * alpha)
    end = gl.minimum(whole_high, high - 1)
    begin = gl.minimum(whole_low, end)
    # Tiles that are seen in part are on both sides of those that are seen whole, but of one code: that of each would be
    # read from memory for each item.
    SIDES: gl.constexpr = 2 if shape.WINDOW > 0 or shape.FIRST % shape.BLOCK_N > 0 else 1
    upper, lower = high - 1, end
    for _ in range(0, SIDES):
        p, acc, m_i, l_i, c = _steps(
            p, acc, m_i, l_i, c, upper, lower, rows, of_keys, softcap, pin, channels, True, shape
        )
        p, acc, m_i, l_i, c = _steps(
            p, acc, m_i, l_i, c, lower, begin, rows, of_keys, softcap, pin, channels, False, shape
        )
        upper, lower = begin, low  # no more are seen whole
    return p, acc, m_i, l_i, c


@gluon.jit
def steps_in_order(acc, m_i, sink, c, tiles, rows, of_keys, SINKS: gl.constexpr, softcap, channels, shape):
    """All tiles of an item, products and softmax one after the other, which needs fewer registers: the warps that
    convert keys have those. The other warpgroup's products run beside the softmax."""
    q, q_pos, keys, logit_scale = rows
    low, whole_low, whole_high, high = tiles
    unit = 0.0
    l_i = _sums(gl.zeros([ROWS, shape.BLOCK_N], gl.float32, shape.S_LAYOUT), shape)
    if SINKS:
        l_i = _plus_sink(l_i, sink)
    for back in range(0, high - low):
        tile = high - 1 - back
        channels.k.wait_full(c)
        qk = _logits(q, channels.k.parts(c), shape)
        factor = _tile_factor(of_keys, tile, c, shape)
        next_unit = _unit(of_keys, c, 1) if shape.TOKEN_SCALES else 0.0
        s = warpgroup_mma_wait(0, deps=[qk])
        channels.release(c)
        scale = _scale_of(logit_scale, factor, shape)
        masked = (tile >= whole_high) | (tile < whole_low)
        p, alpha, m_i = _softmax(s, m_i, q_pos, tile, keys, scale, softcap, masked, shape)
        l_i = _grow(l_i, alpha, p, shape)
        if shape.TOKEN_SCALES:
            alpha *= gl.exp2(unit - next_unit)
            unit = next_unit
        acc = rescale(acc, alpha)
        channels.v.wait_full(c)
        acc = end_outputs(begin_outputs(p, channels.v.parts(c), acc, shape), shape)
        c += 1
    if shape.TOKEN_SCALES:
        acc = rescale(acc, gl.full_like(m_i, 1.0) * gl.exp2(unit))
    return acc, m_i, l_i, c
