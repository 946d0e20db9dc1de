"""Gluon: outputs of rotated values as they are without the rotation, in the layout in which products leave them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...formats.hadamard import device
from ..gluon_device import bits
from .work_item import ROWS

_signs = gluon.jit(device.signs.fn)


@gluon.jit
def _across_registers(x, BIT: gl.constexpr):
    """Rows [64, D] times the Hadamard matrix of any two columns that differ in a bit, of which a thread has both."""
    LAYOUT: gl.constexpr = x.type.layout
    D: gl.constexpr = x.shape[1]
    a, b = gl.split(x.reshape([ROWS, D >> BIT + 1, 2, 1 << BIT]).permute((0, 1, 3, 2)))
    x = gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([ROWS, D])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _of_other_lane(x, BIT: gl.constexpr):
    """Elements of the column that differs in bit 1 or 2, which is the lowest one of lanes or the next."""
    SHUFFLE: gl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {BIT}, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(SHUFFLE, "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def _across_lanes(x, dim, BIT: gl.constexpr):
    """As `_across_registers`, of which neighbouring threads have one each. By way of another layout it would go through
    shared memory, of which both warpgroups would take the same part."""
    sign = (1 - 2 * ((dim >> BIT) & 1)).to(gl.float32)
    return _of_other_lane(x, BIT) + x * gl.expand_dims(sign, 0)


@gluon.jit
def rotate_back(x, zero):
    """Outputs [64, D] of values that were multiplied by signs and a Hadamard matrix; D is a power of two. zero: 0,
    which the compiler does not know: else the signs of all columns would be in registers while tiles are multiplied."""
    D: gl.constexpr = x.shape[1]
    dim = zero + gl.arange(0, D, gl.SliceLayout(0, x.type.layout))
    for bit in gl.static_range(bits(D)):
        x = _across_lanes(x, dim, bit) if bit == 1 or bit == 2 else _across_registers(x, bit)
    return x * gl.expand_dims(_signs(dim) * D**-0.5, 0)
