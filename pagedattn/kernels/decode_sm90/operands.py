"""Gluon: codes as they were copied, turned into operands of `mma.sync` without leaving their thread.

Which element of a row, or which row, stands at an index of a product does not matter as long as both operands agree. So
the indices are chosen such that the 16 bytes a thread loads at a time are elements that its part of the operand needs,
without a shuffle. Keys are K of S = Q K^T, whose operands hold pairs of a row's elements; values are V of
O = P V, whose operands hold pairs of rows, which two words of neighbouring rows are interleaved to.

Words are int32 of four codes, or eight of 4 bits (`operands_4bit.py`), or two elements that are stored as they are,
codes "native" (`operands_16bit.py`). W warps have 16 keys each, or 32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import gluon_e4m3
from ..gluon_device import bits
from . import operands_4bit, operands_16bit
from .spread_codes import in_stored_order

is_4_bit, is_turboquant = operands_4bit.is_4_bit, operands_4bit.is_turboquant


@gluon.constexpr_function
def key_words(warps, keys, words):
    """Layout of words of keys [W, keys, words]."""
    run = operands_4bit.run_of(words)
    registers = [[0, 0, 1 << i] for i in range(bits(run))]
    registers += [[0, 0, 4 * run << i] for i in range(bits(words // (4 * run)))]
    registers += [[0, 8 << i, 0] for i in range(bits(keys // 8))]
    lanes = [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << i, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, keys, words])


@gluon.constexpr_function
def codes_of_word(codes):
    """Of operands; as they are stored, words that are yet to be spread have twice as many."""
    return 8 if is_4_bit(codes) else 2 if codes == "native" else 4


@gluon.constexpr_function
def may_be_nan(codes):
    """Whether some codes stand for no number, so that those of rows that are not seen must not be multiplied by 0."""
    return codes in ("e4m3", "e5m2", "native")


@gluon.constexpr_function
def sink_exponent(scale_strides):
    """A sink is a key whose value is nothing. Where values have scales, of a plane with these strides, the running
    maximum is that of what codes are multiplied by: a sink is counted as if a value of 1 were a code of two to this
    power, near to where those of others are."""
    return 0.0 if scale_strides is None else 7.0


@gluon.constexpr_function
def _run(words):
    """Words of a value row that a thread has side by side."""
    return min(4, words // 8)


@gluon.constexpr_function
def value_words(warps, keys, words):
    """Layout of words of every second value [W, keys / 2, words]."""
    run = _run(words)
    registers = [[0, 0, 1 << i] for i in range(bits(run))]
    registers += [[0, 0, 8 * run << i] for i in range(bits(words // (8 * run)))]
    registers += [[0, 4 << i, 0] for i in range(bits(keys // 8))]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, run], [0, 0, 2 * run], [0, 0, 4 * run]]
    of_warps = [[1 << i, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, keys // 2, words])


@gluon.jit
def key_element(index, CODES: gl.constexpr):
    """The element of a row that stands at an index of Q K^T's inner dimension; of 4 bits `in_key_order` says it."""
    if CODES == "native":
        element = operands_16bit.key_element(index)
    else:
        element = (index & 1) | ((index >> 2) & 14) | ((index << 3) & 48) | (index >> 6 << 6)
    return element


@gluon.jit
def in_order_of_bytes(x):
    """Rows [R, D] with their elements in the order of `key_element`, of codes of 8 bits."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return x.reshape([R, D // 64, 4, 8, 2]).permute((0, 1, 3, 2, 4)).reshape([R, D])


@gluon.constexpr_function
def key_offset(codes):
    """What elements of `key_operand` are larger by than the codes stand for. It is taken off the products, where they
    begin: a subtraction per element was a tenth of the loop's instructions."""
    return 1152.0 if codes in ("int8", "turboquant4", "turboquant3") else 0.0


@gluon.jit
def key_operand(words, tables, DTYPE: gl.constexpr, CODES: gl.constexpr, MMA: gl.constexpr):
    """[W, keys, D] plus `key_offset`, elements in the order of `key_element`, or of `in_key_order`: float16, of native
    codes DTYPE."""
    if is_4_bit(CODES):
        k = operands_4bit.key_operand(words, tables, CODES, MMA)
    elif CODES == "native":
        k = operands_16bit.key_operand(words, DTYPE, MMA)
    else:
        k = _keys_of_8_bits(words, CODES, MMA)
    return k


@gluon.jit
def elements(words, tables, CODES: gl.constexpr):
    """float16 of codes plus `key_offset` [.., 2, 2], of 4 bits [.., 2, 2, 2], by the bits of their places in words from
    the lowest on. tables: `operands_4bit.level_tables` of them."""
    if is_4_bit(CODES):
        x = operands_4bit.elements(words, tables, CODES)
    else:
        x = _elements_of_8_bits(words, CODES)
    return x


@gluon.jit
def _elements_of_8_bits(words, CODES: gl.constexpr):
    if CODES == "e4m3":
        a, b, c, d = gluon_e4m3.elements(words)
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
    else:  # 1152 + code: 128 + code is the last byte of 1024 + 128 + code
        a, b, c, d = gl.inline_asm_elementwise(
            """{ .reg .b32 u, x, y;
            xor.b32 u, $4, 0x80808080;
            prmt.b32 x, u, 0x64646464, 0x4140; prmt.b32 y, u, 0x64646464, 0x4342;
            mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
            "=h,=h,=h,=h,r",
            [words],
            (gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def _keys_of_8_bits(words, CODES: gl.constexpr, MMA: gl.constexpr):
    W: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    D: gl.constexpr = words.shape[2] * 4
    x = _elements_of_8_bits(words, CODES)
    x = x.reshape([W, KEYS, D // 64, 2, 2, 2, 2, 2, 2]).permute((0, 1, 2, 5, 6, 8, 3, 4, 7)).reshape([W, KEYS, D])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def value_operand(even, odd, tables, DTYPE: gl.constexpr, CODES: gl.constexpr, MMA: gl.constexpr):
    """[W, DV, keys] of the values at even and at odd places, to be put in order by `in_order`: as `key_operand`."""
    if is_4_bit(CODES):
        v = operands_4bit.value_operand(even, odd, tables, _run(even.shape[2]), CODES, MMA)
    elif CODES == "native":
        v = operands_16bit.value_operand(even, odd, _run(even.shape[2]), DTYPE, MMA)
    else:
        v = _values_of_8_bits(even, odd, CODES, MMA)
    return v


@gluon.jit
def pairs_of_8_bits(even, odd, CODES: gl.constexpr):
    """Codes of a word each of two rows, as float16: both rows' first ones, then both rows' second ones, and so on."""
    if CODES == "e4m3":
        a, b, c, d, e, f, g, h = gluon_e4m3.pairs(even, odd)
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
    else:  # 128 + code is the last byte of 1024 + 128 + code
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            """{ .reg .b32 p, q, x, k;
            mov.b32 k, 0x64806480;
            prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
            xor.b32 p, p, 0x80808080; xor.b32 q, q, 0x80808080;
            prmt.b32 x, p, 0x64646464, 0x4140; sub.f16x2 x, x, k; mov.b32 {$0, $1}, x;
            prmt.b32 x, p, 0x64646464, 0x4342; sub.f16x2 x, x, k; mov.b32 {$2, $3}, x;
            prmt.b32 x, q, 0x64646464, 0x4140; sub.f16x2 x, x, k; mov.b32 {$4, $5}, x;
            prmt.b32 x, q, 0x64646464, 0x4342; sub.f16x2 x, x, k; mov.b32 {$6, $7}, x; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [even, odd],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True,
            1,
        )
    return a, b, c, d, e, f, g, h


@gluon.jit
def _values_of_8_bits(even, odd, CODES: gl.constexpr, MMA: gl.constexpr):
    a, b, c, d, e, f, g, h = pairs_of_8_bits(even, odd, CODES)
    W: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    WORDS: gl.constexpr = even.shape[2]
    RUN: gl.constexpr = _run(WORDS)
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    x = x.reshape([W, PAIRS, WORDS // (8 * RUN), 8, RUN, 2, 2, 2]).permute((0, 2, 4, 7, 6, 3, 1, 5))
    return gl.convert_layout(x.reshape([W, 4 * WORDS, 2 * PAIRS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def in_order(acc, CODES: gl.constexpr):
    """The outputs [W * R, DV] of products [W, DV, R] whose first operands are `value_operand`s."""
    W: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    R: gl.constexpr = acc.shape[2]
    N: gl.constexpr = codes_of_word(CODES)
    RUN: gl.constexpr = _run(DV // N)
    x = acc.reshape([W, DV // (8 * N * RUN), RUN, N, 8, R]).permute((0, 5, 1, 4, 2, 3))
    return in_stored_order(x.reshape([W * R, DV]), CODES)
