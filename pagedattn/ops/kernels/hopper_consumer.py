"""Gluon: a computing warpgroup of prefill on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from .hopper_items import ROWS, tiles_of

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


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
def _tanh(x):
    t = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return gl.where(x < 0, -y, y)


@gluon.jit
def _softmax(s, m_i, l_i, q_pos, tile, keys, qk_scale, softcap, MASKED: gl.constexpr, shape):
    """Weights of a tile's logits [64, BLOCK_N], the factor for what was summed before, the new maximum and sum."""
    if shape.SOFTCAP:
        s = _tanh(s * (qk_scale / (softcap * LOG2E))) * (softcap * LOG2E)
        qk_scale = 1.0
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
        s = gl.where(visible, s, -float("inf"))
    top = gl.maximum(m_i, gl.max(s, 1) * qk_scale)
    shift = top
    if MASKED:
        shift = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s * qk_scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m_i - shift)
    return p, alpha, top, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def _steps(p, acc, m_i, l_i, c, high, low, q, q_pos, keys, qk_scale, softcap, channels, MASKED: gl.constexpr, shape):
    """Tiles high - 1 down to low. Q K of each runs beside P V of the one before, whose weights `p` come in."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    for back in range(0, high - low):
        channels.k.wait_full(c)
        zero = gl.zeros([ROWS, shape.BLOCK_N], gl.float32, S_LAYOUT)
        qk = warpgroup_mma(q, channels.k.tile(c).permute((1, 0)), zero, use_acc=False, is_async=True)
        weights = gl.convert_layout(p.to(shape.DTYPE), P_LAYOUT)
        channels.v.wait_full(c - 1)
        pv = warpgroup_mma(weights, channels.v.tile(c - 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[qk])
        p, alpha, m_i, l_i = _softmax(s, m_i, l_i, q_pos, high - 1 - back, keys, qk_scale, softcap, MASKED, shape)
        acc = warpgroup_mma_wait(0, deps=[pv])
        channels.v.release(c - 1)
        channels.k.release(c)  # beside the other: a release makes the warps of the group wait for each other
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
        c += 1
    return p, acc, m_i, l_i, c


@gluon.jit
def _begin(first, head, w: gl.constexpr, sinks, shape):
    """Positions, maximum and sum of a fresh item's rows."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16]))
    row = w * ROWS + gl.arange(0, ROWS, S_ROWS)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, S_ROWS)
    l_i = gl.zeros([ROWS], gl.float32, S_ROWS)
    if sinks is not None:
        m_i = gl.load(sinks + head * shape.PACK + row % shape.PACK).to(gl.float32) * LOG2E
        l_i = gl.where(m_i == -float("inf"), 0.0, 1.0)
    return first + row // shape.PACK, m_i, l_i


@gluon.jit
def _finish(acc, m_i, l_i, token, tokens, head, w: gl.constexpr, output, lse_out, shape):
    """Store an item's rows; those past `tokens` are other sequences'."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    if lse_out is not None:
        row = w * ROWS + gl.arange(0, ROWS, m_i.type.layout)
        place = (token + row // shape.PACK).to(gl.int64) * output.sl_t + head * shape.PACK + row % shape.PACK
        lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
        gl.store(lse_out + place, lse, mask=row // shape.PACK < tokens)
    norm = gl.convert_layout(1.0 / gl.where(l_i == 0, 1.0, l_i), O_ROWS)
    row = w * ROWS + gl.arange(0, ROWS, O_ROWS)
    at = (head * shape.PACK + row % shape.PACK).to(gl.int64)
    place = (token + row // shape.PACK).to(gl.int64) * output.so_t + at * output.so_h
    dim = gl.arange(0, shape.D, gl.SliceLayout(0, O_LAYOUT))
    result = (acc * gl.expand_dims(norm, 1)).to(shape.DTYPE)
    keep = gl.expand_dims(row // shape.PACK < tokens, 1)
    gl.store(output.out + gl.expand_dims(place, 1) + gl.expand_dims(dim, 0), result, mask=keep)


@gluon.jit
def _take(ring, n):
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ring.wait_full(n)
    index = gl.max(ring.tile(n).load(SCALAR), 0)
    gl.thread_barrier()
    ring.release(n)
    return index


@gluon.jit
def consume(w: gl.constexpr, qk_scale, softcap, sinks, output, lse_out, items, channels, shape):
    """Attention of 64 rows of every item handed out; w says which half."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    queries = channels.q1 if w else channels.q0
    total = items.total()
    n = 0  # items begun
    c = 0  # tiles whose logits are known
    index = _take(channels.items, n)
    while index < total:
        token, tokens, first, keys, head = items.look_up(index)
        low, whole_low, whole_high, high = tiles_of(first, tokens, keys, shape)
        q_pos, m_i, l_i = _begin(first, head, w, sinks, shape)
        acc = gl.zeros([ROWS, shape.D], gl.float32, O_LAYOUT)
        queries.wait_full(n)
        channels.k.wait_full(c)
        # Outside the loops: ptxas 12.8 would otherwise set up the addresses that two of them share in the first alone,
        # which may not run.
        q = queries.tile(n).reshape([ROWS, shape.D])
        zero = gl.zeros([ROWS, shape.BLOCK_N], gl.float32, S_LAYOUT)
        qk = warpgroup_mma(q, channels.k.tile(c).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[qk])
        channels.k.release(c)
        c += 1
        p, _, m_i, l_i = _softmax(s, m_i, l_i, q_pos, high - 1, keys, qk_scale, softcap, True, shape)
        masked = gl.minimum(whole_high, high - 1)
        whole = gl.minimum(whole_low, masked)
        p, acc, m_i, l_i, c = _steps(
            p, acc, m_i, l_i, c, high - 1, masked, q, q_pos, keys, qk_scale, softcap, channels, True, shape
        )
        p, acc, m_i, l_i, c = _steps(
            p, acc, m_i, l_i, c, masked, whole, q, q_pos, keys, qk_scale, softcap, channels, False, shape
        )
        if shape.WINDOW > 0:
            p, acc, m_i, l_i, c = _steps(
                p, acc, m_i, l_i, c, whole, low, q, q_pos, keys, qk_scale, softcap, channels, True, shape
            )
        queries.release(n)
        weights = gl.convert_layout(p.to(shape.DTYPE), P_LAYOUT)
        channels.v.wait_full(c - 1)
        pv = warpgroup_mma(weights, channels.v.tile(c - 1), acc, is_async=True)
        n += 1
        index = _take(channels.items, n)
        acc = warpgroup_mma_wait(0, deps=[pv])
        channels.v.release(c - 1)
        _finish(acc, m_i, l_i, token, tokens, head, w, output, lse_out, shape)
