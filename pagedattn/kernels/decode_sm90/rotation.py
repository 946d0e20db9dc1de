"""Gluon: rows times signs and a Hadamard matrix: queries of rotated keys, and outputs of rotated values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...formats.hadamard import device
from ..gluon_device import bits

_signs = gluon.jit(device.signs.fn)
_block_of, _rounds_of = device.block_of, device.rounds_of


@gluon.jit
def rotate(x, HEAD_DIM: gl.constexpr):
    """Rows [R, D], as of `rotate_back`, in the rotation of stored rows."""
    D: gl.constexpr = x.shape[1]
    dim = gl.arange(0, D, gl.SliceLayout(0, x.type.layout))
    return _hadamard(x * gl.expand_dims(_signs(dim) * _block_of(HEAD_DIM) ** -0.5, 0), HEAD_DIM)


@gluon.jit
def rotate_back(x, HEAD_DIM: gl.constexpr):
    """Rows [R, D] of HEAD_DIM elements, and whatever is beyond them, as they were before the rotation: D is a power of
    two, of which a thread has some side by side."""
    D: gl.constexpr = x.shape[1]
    dim = gl.arange(0, D, gl.SliceLayout(0, x.type.layout))
    return _hadamard(x, HEAD_DIM) * gl.expand_dims(_signs(dim) * _block_of(HEAD_DIM) ** -0.5, 0)


@gluon.jit
def _hadamard(x, HEAD_DIM: gl.constexpr):
    """H times rows [R, D] of which a thread has N elements side by side, of the blocks that rows of HEAD_DIM elements
    have. Each round transforms the last bit of an index in its block, which becomes its first; after log2(N) of them
    the next bits come to one thread."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    SIZE: gl.constexpr = _block_of(HEAD_DIM)
    LAYOUT: gl.constexpr = x.type.layout
    MINE: gl.constexpr = bits(LAYOUT.size_per_thread[1])
    for i in gl.static_range(_rounds_of(HEAD_DIM)):
        a, b = gl.split(x.reshape([R, D // SIZE, SIZE // 2, 2]))
        x = gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([R, D])
        if i % MINE == MINE - 1:
            x = gl.convert_layout(x, LAYOUT)
    return gl.convert_layout(x, LAYOUT)
