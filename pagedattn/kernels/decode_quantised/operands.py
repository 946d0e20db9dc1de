"""Gluon: codes of 8 bits as they come from memory, turned into operands of `mma.sync` without leaving their thread.

Which element of a row, or which row, stands at an index of a product does not matter as long as both operands agree. So
the indices are chosen such that the 16 bytes a thread loads at a time are elements that its part of the operand needs:
no shared memory, no shuffle. Keys are K of S = Q K^T, whose operands hold pairs of a row's elements; values are V of
O = P V, whose operands hold pairs of rows, which two words of neighbouring rows are interleaved to.

Words are int32 of four codes. W warps have 16 keys each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(16)  # of a warp's product


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def key_words(warps, words):
    """Layout of words of keys [W, 16, D / 4]."""
    registers = [[0, 0, 1], [0, 0, 2], *([0, 0, 16 << i] for i in range(_bits(words // 16))), [0, 8, 0]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << i, 0, 0] for i in range(_bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 16, words])


@gluon.constexpr_function
def _run(words):
    """Words of a value row that a thread has side by side."""
    return min(4, words // 8)


@gluon.constexpr_function
def value_words(warps, words):
    """Layout of words of every second value [W, 8, DV / 4]."""
    run = _run(words)
    registers = [[0, 0, 1 << i] for i in range(_bits(run))]
    registers += [[0, 0, 8 * run << i] for i in range(_bits(words // (8 * run)))] + [[0, 4, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, run], [0, 0, 2 * run], [0, 0, 4 * run]]
    of_warps = [[1 << i, 0, 0] for i in range(_bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 8, words])


@gluon.jit
def key_element(index):
    """The element of a row that stands at an index of Q K^T's inner dimension."""
    low = (index & 1) | ((index >> 2) & 14) | ((index << 3) & 48)
    return low | (index >> 6 << 6)


@gluon.jit
def key_operand(words, CODES: gl.constexpr, MMA: gl.constexpr):
    """float16 [W, 16, D], elements in the order of `key_element`."""
    if CODES == "e4m3":
        a, b, c, d = gl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 x, y;
            mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
            mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
            "=h,=h,=h,=h,r",
            [words],
            (gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    elif CODES == "e5m2":  # the upper byte of a float16
        a, b, c, d = gl.inline_asm_elementwise(
            """{ .reg .b32 x, y;
            prmt.b32 x, $4, 0, 0x1404; prmt.b32 y, $4, 0, 0x3424;
            mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
            "=h,=h,=h,=h,r",
            [words],
            (gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    else:  # as the last byte of 1024 + (code + 128)
        a, b, c, d = gl.inline_asm_elementwise(
            """{ .reg .b32 u, x, y, k;
            mov.b32 k, 0x64806480; xor.b32 u, $4, 0x80808080;
            prmt.b32 x, u, 0x64646464, 0x4140; prmt.b32 y, u, 0x64646464, 0x4342;
            sub.f16x2 x, x, k; sub.f16x2 y, y, k;
            mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
            "=h,=h,=h,=h,r",
            [words],
            (gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    W: gl.constexpr = words.shape[0]
    D: gl.constexpr = words.shape[2] * 4
    x = gl.join(gl.join(a, b), gl.join(c, d))
    x = x.reshape([W, KEYS, D // 64, 2, 2, 2, 2, 2, 2]).permute((0, 1, 2, 5, 6, 8, 3, 4, 7)).reshape([W, KEYS, D])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def value_operand(even, odd, CODES: gl.constexpr, MMA: gl.constexpr):
    """[W, DV, 16] of the values at even and at odd places, to be put in order by `in_order`. float16; of integers
    bfloat16, since their scales go with the probabilities and may be small."""
    if CODES == "e4m3":
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            """{ .reg .b32 p, q, x; .reg .b16 a, b;
            prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
            mov.b32 {a, b}, p; cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {$0, $1}, x;
            cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {$2, $3}, x;
            mov.b32 {a, b}, q; cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {$4, $5}, x;
            cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {$6, $7}, x; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    elif CODES == "e5m2":
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            """{ .reg .b32 p, q, x;
            prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
            prmt.b32 x, p, 0, 0x1404; mov.b32 {$0, $1}, x; prmt.b32 x, p, 0, 0x3424; mov.b32 {$2, $3}, x;
            prmt.b32 x, q, 0, 0x1404; mov.b32 {$4, $5}, x; prmt.b32 x, q, 0, 0x3424; mov.b32 {$6, $7}, x; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    else:  # 128 + (the lower seven bits), less 128 or, where the sign bit is set, 256
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            """{ .reg .b32 s, x, y, m, k;
            mov.b32 m, 0xBF80BF80; mov.b32 k, 0x43004300;
            prmt.b32 s, $8, $9, 0x4400; lop3.b32 x, s, 0x007F007F, k, 0xEA; lop3.b32 y, s, 0x00800080, k, 0xEA;
            fma.rn.bf16x2 x, y, m, x; mov.b32 {$0, $1}, x;
            prmt.b32 s, $8, $9, 0x5511; lop3.b32 x, s, 0x007F007F, k, 0xEA; lop3.b32 y, s, 0x00800080, k, 0xEA;
            fma.rn.bf16x2 x, y, m, x; mov.b32 {$2, $3}, x;
            prmt.b32 s, $8, $9, 0x6622; lop3.b32 x, s, 0x007F007F, k, 0xEA; lop3.b32 y, s, 0x00800080, k, 0xEA;
            fma.rn.bf16x2 x, y, m, x; mov.b32 {$4, $5}, x;
            prmt.b32 s, $8, $9, 0x7733; lop3.b32 x, s, 0x007F007F, k, 0xEA; lop3.b32 y, s, 0x00800080, k, 0xEA;
            fma.rn.bf16x2 x, y, m, x; mov.b32 {$6, $7}, x; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            True,
            1,
        )
    W: gl.constexpr = even.shape[0]
    WORDS: gl.constexpr = even.shape[2]
    RUN: gl.constexpr = _run(WORDS)
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    x = x.reshape([W, KEYS // 2, WORDS // (8 * RUN), 8, RUN, 2, 2, 2]).permute((0, 2, 4, 7, 6, 3, 1, 5))
    return gl.convert_layout(x.reshape([W, 4 * WORDS, KEYS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def in_order(acc):
    """The outputs [W * R, DV] of products [W, DV, R] whose first operands are `value_operand`s."""
    W: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    R: gl.constexpr = acc.shape[2]
    RUN: gl.constexpr = _run(DV // 4)
    x = acc.reshape([W, DV // (32 * RUN), RUN, 2, 2, 8, R]).permute((0, 6, 1, 5, 2, 3, 4))
    return x.reshape([W * R, DV])
