"""Gluon device code that kernel families share: units of logits, the soft cap, conditional rescaling, ranges of
numbers, states that are added up, who of several programs is last."""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import softmax
from .gluon_names import thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# What smaller scales of values are read as: a sum of exp(logit), in units of the largest exp(logit) * scale, or of one
# that is 2**8 times smaller, then is a float32.
SMALLEST_SCALE = gl.constexpr(2.0**-100)
# Conditional rescaling (FlashAttention-4, 2026): states are rescaled only where a logit, as an exponent of two, is
# further above what they are multiples of. float16 has weights of up to 2**15.
RESCALE_THRESHOLD = gl.constexpr(8.0)
# Its bits: as integers, numbers that are not negative have their order, and a warp's largest is one instruction.
THRESHOLD_BITS = gl.constexpr(struct.unpack("i", struct.pack("f", RESCALE_THRESHOLD.value))[0])
LEAST = gl.constexpr(-(2.0**127))  # what states of rows that have seen no key are multiples of: -inf less it is -inf
tanh = gluon.jit(softmax.tanh_by_instruction.fn)


@gluon.constexpr_function
def bits(count):
    """Of an index below `count`, a power of two."""
    return count.bit_length() - 1


@gluon.constexpr_function
def tile_layout(shape):
    """Of 16-bit elements [.., n] in shared memory, as `wgmma` and TMA take them."""
    return gl.NVMMASharedLayout(min(128, 2 * shape[-1]), element_bitwidth=16, rank=len(shape))


@gluon.jit
def approximate(OP: gl.constexpr, x):
    """ "lg2" or "rcp" of normal numbers, exact to 2**-22 or so, where `gl.log2` and a division are to the last digit by
    20 instructions."""
    return gl.inline_asm_elementwise(OP + ".approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def powers_of_two(largest, EXPONENT: gl.constexpr, LEAST: gl.constexpr):
    """Of largest magnitudes, float32: the powers of two that bring them to 2**EXPONENT or up to twice that, and their
    inverses. LEAST: the biased exponent that smaller magnitudes are taken to have, so that these are normal numbers."""
    exponent = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) & 255, LEAST)
    down = ((254 + EXPONENT - exponent) << 23).to(gl.float32, bitcast=True)
    return down, ((exponent - EXPONENT) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def merge_factors(m_i, other):
    """The maximum of two states, and what each is multiplied with to be added up."""
    top = gl.maximum(m_i, other)
    shift = gl.where(top == -float("inf"), 0.0, top)
    return top, gl.exp2(m_i - shift), gl.exp2(other - shift)


@gluon.jit
def is_last(counter, arrivals):
    """Count an arrival; the last one leaves the counter as it was found."""
    thread_barrier()  # every thread's stores before the count that publishes them
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        gl.store(counter, 0)
    return last
