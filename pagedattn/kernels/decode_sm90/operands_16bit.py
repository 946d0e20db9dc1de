"""Gluon: elements of 16 bits, which are stored as they are, in the order of operands of `mma.sync`; a word has two.

`operands.py` says why the order is free. A row's 16 bytes of a thread are what two products take.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def key_element(index):
    """The element of a row that stands at an index of Q K^T's inner dimension."""
    return (index & 1) | ((index >> 2) & 6) | ((index << 2) & 24) | (index >> 5 << 5)


@gluon.jit
def key_operand(words, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """DTYPE [W, keys, D] of words of keys, in the order of `key_element`."""
    W: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    D: gl.constexpr = words.shape[2] * 2
    HALVES: gl.constexpr = (gl.float16, gl.float16)
    a, b = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], HALVES, True, 1)
    x = gl.join(a, b).to(DTYPE, bitcast=True)
    x = x.reshape([W, KEYS, D // 32, 4, 2, 2, 2]).permute((0, 1, 2, 4, 5, 3, 6)).reshape([W, KEYS, D])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def value_operand(even, odd, RUN: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """DTYPE [W, DV, keys] of the words of values at even and at odd places, to be put in order by `in_order`."""
    W: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    WORDS: gl.constexpr = even.shape[2]
    HALVES: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    a, b, c, d = gl.inline_asm_elementwise(
        """{ .reg .b32 x, y;
        prmt.b32 x, $4, $5, 0x5410; prmt.b32 y, $4, $5, 0x7632;
        mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
        "=h,=h,=h,=h,r,r",
        [even, odd],
        HALVES,
        True,
        1,
    )
    x = gl.join(gl.join(a, b), gl.join(c, d)).to(DTYPE, bitcast=True)
    x = x.reshape([W, PAIRS, WORDS // (8 * RUN), 8, RUN, 2, 2]).permute((0, 2, 4, 6, 3, 1, 5))
    return gl.convert_layout(x.reshape([W, 2 * WORDS, 2 * PAIRS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
