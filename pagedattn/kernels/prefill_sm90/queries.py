"""Gluon: queries in the dtype of the keys that they are multiplied with, in the place of the queries.

A power of two puts each row's largest element between 128 and 256, below the largest e4m3 and float16. As e4m3, so that
fp8 keys are multiplied as they are stored, a query is the sum of two: the eight significant bits of a bfloat16 are four
and four, and of an element only what is below 2**-16 of the row's largest is lost. Two parts take as long to multiply
with as a bfloat16 would. float16 has all eight bits, and loses what is below 2**-32 of the row's largest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gluon_e4m3 import two_e4m3
from ..gluon_names import reinterpret, thread_barrier
from .work_item import ROWS


@gluon.jit
def split_queries(room, shape):
    """Queries [64, D] as two e4m3 in their place, in the order of their products, and what the logits of each row are
    to be multiplied with."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.D, shape.D // 8], [4, 1], [1, 0])
    q = room.load(WIDE).to(gl.float32)
    down, up = _powers(q, shape)
    low, high = two_e4m3(q, down)
    return _parts(room, low, high, shape), up


@gluon.jit
def _parts(room, first, second, shape):
    """Both in the place of the queries."""
    thread_barrier()  # every thread has read what is replaced
    parts = reinterpret(room, first.dtype, [2, ROWS, shape.D], shape.CODE_LAYOUT)
    parts.index(0).store(first)
    parts.index(1).store(second)
    fence_async_shared()
    thread_barrier()
    return parts.index(0), parts.index(1)


@gluon.jit
def cast_queries(room, shape):
    """Queries [64, D] as float16, in their place, and what the logits of each row are to be multiplied with."""
    ROW: gl.constexpr = gl.BlockedLayout([1, shape.D // 2], [16, 2], [4, 1], [1, 0])  # a row to two threads
    q = room.load(ROW).to(gl.float32)
    down, up = _powers(q, shape)
    LAYOUT: gl.constexpr = room.layout
    cast = reinterpret(room, gl.float16, [ROWS, shape.D], LAYOUT)
    thread_barrier()  # every thread has read what is replaced
    cast.store((q * down).to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return cast, up


@gluon.jit
def _powers(q, shape):
    """Powers of two that put the largest of each row of q [64, D] below 256: by element; and their inverses by row, NaN
    of one with an element that is not finite."""
    # The largest of bits, in which NaN is larger than all numbers.
    exponent = gl.max(q.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
    exponent = gl.maximum(exponent, 32)  # what follows are normal numbers
    down = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    down, _ = gl.broadcast(gl.expand_dims(down, 1), q)
    up = gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True))
    return down, gl.convert_layout(up, gl.SliceLayout(1, shape.S_LAYOUT))
