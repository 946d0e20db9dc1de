"""Gluon: rows times signs and a Hadamard matrix: queries of rotated keys, and outputs of rotated values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...formats.hadamard import device
from ..gluon_device import bits

_signs = gluon.jit(device.signs.fn)


@gluon.jit
def rotate(x):
    """Rows [R, D], as of `rotate_back`, in the rotation of stored rows."""
    D: gl.constexpr = x.shape[1]
    dim = gl.arange(0, D, gl.SliceLayout(0, x.type.layout))
    return _hadamard(x * gl.expand_dims(_signs(dim) * D**-0.5, 0))


@gluon.jit
def rotate_back(x):
    """Rows [R, D] as they were before the rotation, D a power of two of which a thread has some side by side."""
    D: gl.constexpr = x.shape[1]
    dim = gl.arange(0, D, gl.SliceLayout(0, x.type.layout))
    return _hadamard(x) * gl.expand_dims(_signs(dim) * D**-0.5, 0)


@gluon.jit
def _hadamard(x):
    """H times rows [R, D] of which a thread has N elements side by side. Each round transforms an index's last bit,
    which becomes its first; after log2(N) of them the next bits come to one thread."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    MINE: gl.constexpr = bits(LAYOUT.size_per_thread[1])
    for i in gl.static_range(bits(D)):
        a, b = gl.split(x.reshape([R, D // 2, 2]))
        x = gl.join(a + b, a - b).permute((0, 2, 1)).reshape([R, D])
        if i % MINE == MINE - 1:
            x = gl.convert_layout(x, LAYOUT)
    return gl.convert_layout(x, LAYOUT)
