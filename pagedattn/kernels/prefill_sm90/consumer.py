"""Gluon: a computing warpgroup of prefill on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.core import _aggregate as aggregate

from ..gluon_device import LN2, LOG2E
from ..gluon_names import reinterpret, thread_barrier
from . import tile_rows
from .queries import cast_queries, split_queries
from .rotation import rotate_back
from .split_kv import publish
from .tile_steps import above_zero, begin_outputs, end_outputs, rescale, steps_in_order, steps_overlapped
from .work_item import ROWS, has_four_bits, last_seen, output_layout, take, tiles_of

_head_of, _token_of = gluon.jit(tile_rows.head_of.fn), gluon.jit(tile_rows.token_of.fn)


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
def _begin(item, w: gl.constexpr, sinks, shape):
    """Positions of a fresh item's rows, or of earlier blocks the last keys that they see, their maximum, and what a
    sink adds to their sum."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, shape.S_LAYOUT)
    row = w * ROWS + gl.arange(0, ROWS, S_ROWS)
    m_i = gl.full([ROWS], -float("inf"), gl.float32, S_ROWS)
    sink = gl.zeros([ROWS], gl.float32, S_ROWS)
    if sinks is not None:
        head = _head_of(row, shape.PACK)
        logit = gl.load(sinks + item.head * shape.HEADS + head, mask=head < shape.HEADS, other=0.0).to(gl.float32)
        # Rounded here. Fused into a subtraction behind it, it would be so in an item's first tile alone, and a row's
        # bits would depend on whether that is the first one that it sees.
        factor = gl.full_like(logit, LOG2E)
        m_i = gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [logit, factor], gl.float32, True, 1)
        if shape.SPLIT_KV:
            m_i = gl.where(item.nth == 0, m_i, -float("inf"))
        sink = gl.where(m_i == -float("inf"), 0.0, 1.0)
    return last_seen(item.first + _token_of(row, shape.PACK), shape), m_i, sink


@gluon.jit
def _exists(row, item, shape):
    """Whether rows of an item are of its tokens, and of heads of its group."""
    exists = _token_of(row, shape.PACK) < item.tokens
    if shape.HEADS < shape.PACK:
        exists = exists & (_head_of(row, shape.PACK) < shape.HEADS)
    return exists


@gluon.jit
def _finish(acc, m_i, l_i, item, w: gl.constexpr, rooms, of_values, output, lse_out, shape):
    """Store an item's rows; those past its tokens are other sequences'. rooms: the parts of its queries' tile."""
    if lse_out is not None:
        row = w * ROWS + gl.arange(0, ROWS, m_i.type.layout)
        token, head = _token_of(row, shape.PACK), _head_of(row, shape.PACK)
        place = (item.token + token).to(gl.int64) * output.sl_t + item.head * shape.HEADS + head
        lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
        gl.store(lse_out + place, lse, mask=_exists(row, item, shape))
    v_scale, s_vscale, factor = of_values
    if v_scale is not None:
        factor = factor * gl.load(v_scale + item.head // shape.PACKS * s_vscale)
    acc = rescale(acc, factor / gl.where(l_i == 0, 1.0, l_i))
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
    at = (item.head * shape.HEADS + _head_of(row, shape.PACK)).to(gl.int64)
    place = (item.token + _token_of(row, shape.PACK)).to(gl.int64) * output.so_t + at * output.so_h
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
def consume(
    w: gl.constexpr, qk_scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape,
    casts=None,
):  # fmt: skip
    """Attention of 64 rows of every item handed out; w says which half. of_keys, of_values: scales of a call, or None,
    and their strides by head; of values also one that the host knows. TOKEN_SCALES: in the place of keys'
    `scale_planes.ScaleRooms`, KEY_SCALES: of each stage, [STAGES, BLOCK_N] in shared memory; TILE_SCALES lie as
    [B, Hkv, tiles], with strides by head and by sequence. casts: as `produce_queries` fills them, or None, where a
    consumer casts its queries itself."""
    queries = channels.q1 if w else channels.q0
    pin = channels.pins.index(w % channels.pins.shape[0])
    n = 0  # items begun
    c = 0  # tiles whose logits are known
    item = take(channels.items, n, 4, shape)
    while item.live > 0:
        if casts is None:
            queries.wait_full(n)
        else:
            casts[w].wait_full(n)
        if (w == 1) & (item.tokens <= _token_of(ROWS, shape.PACK)):
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
            if shape.SPLIT_Q:
                q, up = split_queries(rooms[0], shape)
                logit_scale *= up
            if shape.CAST_Q:
                if casts is None:
                    cast, up = cast_queries(rooms[0], shape)
                else:
                    LAYOUT: gl.constexpr = rooms[0].layout
                    cast = reinterpret(rooms[0], gl.float16, [ROWS, shape.D], LAYOUT)
                    up = casts[w].tile(n).load(gl.SliceLayout(1, shape.S_LAYOUT))
                q = (cast,)
                logit_scale *= up
            CONVERTED: gl.constexpr = shape.ROW_SCALES or shape.CONVERT_KEYS
            if CONVERTED and not (shape.TILE_SCALES or shape.TOKEN_SCALES):  # of which steps make others
                logit_scale = above_zero(logit_scale)
            rows = (q, q_pos, keys, logit_scale)
            tiles = (low, whole_low, whole_high, high)
            if shape.CONVERT_KEYS:
                acc, m_i, l_i, c = steps_in_order(
                    acc, m_i, sink, c, tiles, rows, k_scale, sinks is not None, softcap, channels, shape
                )
                following = take(channels.items, n + 1, 4, shape)
            else:
                p, acc, m_i, l_i, c = steps_overlapped(
                    acc, m_i, sink, c, tiles, rows, k_scale, sinks is not None, softcap, pin, channels, shape
                )
                channels.v.wait_full(c - 1)
                pv = begin_outputs(p, channels.v.parts(c - 1), acc, shape)
                following = take(channels.items, n + 1, 4, shape)
                acc = end_outputs(pv, shape)
            l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
            if has_four_bits(shape.V_CODES):
                acc = (rotate_back(acc[0], item.live - 1),)
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
