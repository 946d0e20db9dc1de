"""Gluon: warps that load queries, and make those of bfloat16 float16, in their place, while the computing warpgroups
are at the item before; one for each of these.

A power of two puts each row's largest element between 2**14 and 2**15, so that float16 has all eight bits of what is
not below 2**-28 of it. Two elements of a word are done at once, as whole numbers: exponents become less by one number
of the row, and move from eight bits to five.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..gluon_names import reinterpret
from .producer import load_rows
from .work_item import ROWS, take

_LARGEST = gl.constexpr(29)  # the exponent that a row's largest element has, as float16 stores it
_AT_ONCE = gl.constexpr(8)  # rows, after which addresses in shared memory are swizzled alike
_ABSOLUTE = gl.constexpr(0x7FFF7FFF)


@gluon.jit
def produce_queries(w: gl.constexpr, descs, casts, channels, shape):
    """Loads a consumer's queries of every item handed out, and casts them. casts: of each consumer a ring of what its
    rows' logits are to be multiplied with, [64] float32, full when its queries are float16, and emptied as its queries
    are. None: queries stay what they are."""
    queries = channels.q1 if w else channels.q0
    n = 0
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        load_rows(w, descs, item, queries, n, shape)
        if casts is not None:
            queries.wait_full(n)
            _cast_rows(queries.tile(n), casts[w].tile(n), shape)
            mbarrier.arrive(casts[w].barrier(n), count=1)
        n += 1
        item = take(channels.items, n, 1, shape)


@gluon.jit
def _cast_rows(room, ups, shape):
    PARTS: gl.constexpr = shape.D // 64  # of a row, whose rows lie together
    STEPS: gl.constexpr = ROWS // _AT_ONCE
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = reinterpret(room, gl.int32, [PARTS * STEPS, _AT_ONCE, 32], SWIZZLED)
    up_rows = reinterpret(ups, gl.float32, [STEPS, _AT_ONCE], PLAIN)
    for step in range(0, STEPS):
        most = tiles.index(step).load(WORDS) & _ABSOLUTE
        for part in gl.static_range(1, PARTS):
            most = _larger(most, tiles.index(part * STEPS + step).load(WORDS) & _ABSOLUTE)
        # The largest of bits, in which NaN is larger than all numbers.
        largest = gl.reduce(most, 1, _larger)
        exponent = gl.maximum(largest & 0xFFFF, largest >> 16) >> 7
        less = gl.maximum(exponent, 32) - _LARGEST
        up = gl.where(exponent == 255, float("nan"), ((less + 15) << 23).to(gl.float32, bitcast=True))
        up_rows.index(step).store(up)
        less, _ = gl.broadcast(gl.expand_dims((less << 7) * 0x10001, 1), most)
        for part in gl.static_range(PARTS):
            tile = tiles.index(part * STEPS + step)
            word = tile.load(WORDS)
            size = (_larger(word & _ABSOLUTE, less) << 3) - (less << 3)
            tile.store(size | (word & ~_ABSOLUTE))
    fence_async_shared()


@gluon.jit
def _larger(a, b):
    """Of either half of words."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, True, 1)
