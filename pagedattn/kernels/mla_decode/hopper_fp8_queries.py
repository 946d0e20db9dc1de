"""Gluon: an item's queries in shared memory, as latent rows of codes are multiplied with them on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gluon_device import powers_of_two
from ..gluon_e4m3 import two_e4m3
from .hopper_fp8_operands import PANEL, WARPS, in_key_order
from .hopper_items import LATENT, ROPE


@gluon.constexpr_function
def _rope_layout(rows):
    """Of rotated parts [rows, ROPE]: a row is in the warp that has its latent part."""
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
    down, _ = gl.broadcast(down, x)
    low, high = two_e4m3(x, down)
    room.index(0).slice(FIRST, x.shape[0]).store(low)
    room.index(1).slice(FIRST, x.shape[0]).store(high)


@gluon.jit
def load_queries(w: gl.constexpr, query, sq_t, sq_h, scale, item, part, n, rooms, shape):
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
    # Below 256, as the sum of two e4m3 has to be, or just below float16's largest.
    down, up = powers_of_two(largest, 7 if shape.CODE_PRODUCTS else 15, 32)
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
