"""Gluon: vectors along an axis of tensors of three: warps, rows or channels, rows of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def in_3d(x, axis: gl.constexpr):
    """A vector along one of three axes."""
    for i in gl.static_range(3):
        if i != axis:
            x = gl.expand_dims(x, i)
    return x


@gluon.constexpr_function
def along(axis, layout):
    """The layout of a vector that `in_3d` puts along an axis of `layout`."""
    for i in reversed(range(3)):
        if i != axis:
            layout = gl.SliceLayout(i, layout)
    return layout
