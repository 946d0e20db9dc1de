"""Gluon: codes of values as they were copied, turned into the first operand of `wgmma`, of O^T = V^T P^T, without
leaving their thread.

A warp has 32 channels of all of a tile's keys, a thread four of them, half a word of codes of 4 bits. Two words of
neighbouring keys are interleaved to pairs, as in `operands.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import bits
from . import operands, operands_4bit
from .operands_4bit import is_4_bit, is_turboquant
from .spread_codes import in_stored_order

WARPS = gl.constexpr(4)
CHANNELS = gl.constexpr(128)
_PAIRS = gl.constexpr(8)  # of the keys that a warp has copied


@gluon.constexpr_function
def value_words(words):
    """Layout of words of every second value [WARPS, 8, words], by the warp that copied them. Of rows of half as many
    words as there are threads for, two threads have the same one."""
    parts = [[0, 0, 1 << i] for i in range(bits(words))]
    parts = [[0, 0, 0]] * (5 - len(parts)) + parts
    lanes = [[0, 1, 0], [0, 2, 0], *parts[:3]]
    return gl.DistributedLinearLayout([[0, 4, 0], [1, 0, 0], [2, 0, 0]], lanes, parts[3:], [], [4, 8, words])


@gluon.constexpr_function
def _halves(words):
    """Layout [WARPS, 8, words, 2] of the halves of words of `value_words`."""
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0]]
    registers, warps = [[0, 4, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]], [[0, 0, 4, 0], [0, 0, 8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 8, words, 2])


@gluon.constexpr_function
def _pairs_of_levels(count):
    """Four codes each of two rows, in the halves of words that $10 selects, as pairs of levels."""
    text = "{ .reg .b32 a, b, p, q, u, x, y, c, k; mov.b32 k, 0x64806480; prmt.b32 c, $8, $9, $10; "
    text += operands_4bit.look_up("c", "$11", "$12", count)
    text += "prmt.b32 p, a, b, 0x5140; prmt.b32 q, a, b, 0x7362; "
    for at in range(4):
        text += operands_4bit.level_pair(at, count, "pq", 2 * at)
    return text + "}"


@gluon.jit
def _in_halves(words, HALVES: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(3, HALVES), assert_trivial=True), 3)


@gluon.jit
def _pairs_of_4_bits(even, odd, tables, CODES: gl.constexpr):
    HALVES: gl.constexpr = _halves(even.shape[2])
    LEVELS: gl.constexpr = is_turboquant(CODES)
    OUT: gl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r"
    TEXT: gl.constexpr = (
        _pairs_of_levels(operands_4bit.bits_of(CODES)) if LEVELS else operands_4bit.steps_of_halves("$10")
    )
    GIVEN: gl.constexpr = OUT + ",r,r" if LEVELS else OUT
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, HALVES))))
    selector = 0x5410 + 0x2222 * gl.expand_dims(gl.expand_dims(gl.expand_dims(which, 0), 0), 0)
    even, odd = _in_halves(even, HALVES), _in_halves(odd, HALVES)
    below, above = _in_halves(tables[0], HALVES), _in_halves(tables[1], HALVES)
    given = [even, odd, selector, below, above] if LEVELS else [even, odd, selector]
    return gl.inline_asm_elementwise(TEXT, GIVEN, given, operands_4bit.EIGHT, True, 1)


@gluon.jit
def value_operand(even, odd, tables, CODES: gl.constexpr, OUTPUT: gl.constexpr):
    """float16 [CHANNELS, keys] of the words of values at even and at odd places, in layout `value_words`, to be put in
    order by `in_order`. tables: `operands_4bit.level_tables` of them."""
    if is_4_bit(CODES):
        a, b, c, d, e, f, g, h = _pairs_of_4_bits(even, odd, tables, CODES)
    else:
        a, b, c, d, e, f, g, h = operands.pairs_of_8_bits(even, odd, CODES)
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # [by the warp that copied, pair of keys, warp, thread, key of the pair, then of a channel both bits]
    x = x.reshape([WARPS, _PAIRS, WARPS, 8, 2, 2, 2]).permute((6, 2, 5, 3, 0, 1, 4))
    return gl.convert_layout(
        x.reshape([CHANNELS, 2 * WARPS * _PAIRS]), gl.DotOperandLayout(0, OUTPUT, 2), assert_trivial=True
    )


@gluon.jit
def in_order(acc, CODES: gl.constexpr):
    """Outputs [R, CHANNELS] of products [CHANNELS, R] whose first operands are `value_operand`s."""
    R: gl.constexpr = acc.shape[1]
    x = acc.reshape([2, WARPS, 2, 8, R]).permute((4, 1, 3, 0, 2))
    return in_stored_order(x.reshape([R, CHANNELS]), CODES)
