"""Gluon device code that kernel families share: units of logits, the soft cap, who of several programs is last."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_names import thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tanh(x):
    """tanh through exp2."""
    t = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return gl.where(x < 0, -y, y)


@gluon.jit
def is_last(counter, arrivals):
    """Count an arrival; the last one leaves the counter as it was found."""
    thread_barrier()  # every thread's stores before the count that publishes them
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        gl.store(counter, 0)
    return last
