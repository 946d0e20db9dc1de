"""Gluon: codes of 4 bits, turned into operands of `mma.sync` as `operands.py` does those of 8; a word has eight. Those
of 2 or 3 bits are too, spread to places of 4 (`spread_codes.py`).

Keys in steps of each channel of a block (int4) are 64 + c for codes c, bits of a float16's mantissa; queries of up to 8
rows are multiplied by the steps, and for more rows the keys are. Levels (TurboQuant) are looked up by byte
permutations, whose selectors are the codes. One has eight levels; of sixteen, one looks up those of the codes from 8 on
and gives 0 for the others, which have the selector's sign bit, and one those below.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...formats.turboquant import codebook
from ..gluon_device import bits
from .axes import along, in_3d

EIGHT = gl.constexpr((gl.float16,) * 8)
SIXTEEN = gl.constexpr((gl.float16,) * 16)
STEP_OFFSET = gl.constexpr(64.0)  # what keys in steps are larger by than their codes


@gluon.constexpr_function
def is_4_bit(codes):
    return codes in ("int4_per_channel", "rotated_int4") or is_turboquant(codes)


@gluon.constexpr_function
def is_turboquant(codes):
    return codes in ("turboquant4", "turboquant3", "turboquant2")


@gluon.constexpr_function
def bits_of(codes):
    return int(codes[-1])


@gluon.constexpr_function
def run_of(words):
    """Words of a key row of `words` that a thread has side by side."""
    return min(4, words // 4)


@gluon.constexpr_function
def _table(at, count):
    """Four levels, bytes of a word: those of codes from 4 * `at` on, of `count` bits. Of 4 bits they are without their
    sign, of 3 they are 128 larger, of 2 the upper byte of a float16 whose lower one is 0."""
    if count == 2:
        levels = codebook.UPPER_BYTES
    else:
        levels = [abs(one) if count == 4 else 128 + one for one in codebook.LEVELS[count]]
    return sum(one << 8 * i for i, one in enumerate(levels[4 * at : 4 * at + 4]))


@gluon.constexpr_function
def _int32(word):
    return word - (word >> 31 << 32)


@gluon.jit
def level_tables(begin, LAYOUT: gl.constexpr, CODES: gl.constexpr):
    """Of 16 levels the first four below zero and the first four above, of fewer the first four and nothing, each a
    tensor of one value in the LAYOUT of words [W, rows, words]: as `look_up` takes them; of other codes nothing.
    begin: a number that is not negative. A byte permutation takes one constant; another one that is known to be the
    same for all threads would be copied for each permutation, so that it is made of what differs from thread to thread:
    a number and its sign, 0, which the compiler does not know. Of begin + row it does: begin is a multiple of more than
    rows, so that their sum has begin's sign, the same for all."""
    SHAPE: gl.constexpr = LAYOUT.shape
    number = in_3d(begin + 65 * gl.arange(0, SHAPE[1], along(1, LAYOUT)), 1)
    nothing, _ = gl.broadcast(number >> 31, gl.zeros(SHAPE, gl.int32, LAYOUT))
    if is_turboquant(CODES):
        BITS: gl.constexpr = bits_of(CODES)
        tables = (nothing | _int32(_table(0, BITS)), nothing | _int32(_table(2, BITS)))
    else:
        tables = (nothing, nothing)
    return tables


@gluon.constexpr_function
def look_up(word, below, above, count):
    """Instructions that make levels of the codes, of `count` bits, of register `word`, as `_pair` takes them, bytes of
    registers a and b. They use u, x and y; `below` and `above` are the registers of `level_tables`."""
    if count < 4:
        second = _table(1, count)
        return f"prmt.b32 a, {below}, {second:#x}, {word}; shr.u32 y, {word}, 16; prmt.b32 b, {below}, {second:#x}, y; "
    text = f"xor.b32 u, {word}, 0x88888888; "
    for to, code, other in (("a", word, "u"), ("b", "y", "x")):
        if to == "b":
            text += f"shr.u32 y, {word}, 16; shr.u32 x, u, 16; "
        text += f"prmt.b32 {to}, {above}, {_table(3, 4):#x}, {other}; prmt.b32 x, {below}, {_table(1, 4):#x}, {code}; "
        text += f"sub.u32 {to}, {to}, x; add.u32 {to}, {to}, 0x80808080; "
    return text


@gluon.constexpr_function
def _pair(at, count, words):
    """An instruction that makes register x of levels 2 * `at` and the next one in the bytes of two `words`, as float16:
    of 2 bits as they are, of more 1152 larger."""
    if count == 2:
        return f"prmt.b32 x, {words[at // 2]}, 0, {(0x1404, 0x3424)[at % 2]:#x}; "
    return f"prmt.b32 x, {words[at // 2]}, 0x64646464, {(0x4140, 0x4342)[at % 2]:#x}; "


@gluon.constexpr_function
def level_pair(at, count, words, to):
    """The same as levels, in registers $`to` and the next one; k is 1152, twice."""
    text = _pair(at, count, words) + ("sub.f16x2 x, x, k; " if count > 2 else "")
    return text + f"mov.b32 {{${to}, ${to + 1}}}, x; "


@gluon.constexpr_function
def _key_levels(count):
    text = f"{{ .reg .b32 a, b, u, x, y; {look_up('$8', '$9', '$10', count)}"
    for at in range(4):
        text += f"{_pair(at, count, 'ab')} mov.b32 {{${2 * at}, ${2 * at + 1}}}, x; "
    return text + "}"


@gluon.constexpr_function
def _key_steps():
    text = "{ .reg .b32 s, x; shl.b32 s, $8, 4; "
    for at in range(4):
        text += f"prmt.b32 x, s, $8, {at | (4 + at) << 8:#x}; lop3.b32 x, x, 0x00F000F0, 0x54005400, 0xEA; "
        text += f"mov.b32 {{${2 * at}, ${2 * at + 1}}}, x; "
    return text + "}"


@gluon.jit
def elements(words, tables, CODES: gl.constexpr):
    """float16 of codes plus an offset [.., 2, 2, 2], by the bits of their places in words from the lowest on. tables:
    `level_tables` of such words."""
    OUT: gl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h,"
    if is_turboquant(CODES):
        TEXT: gl.constexpr = _key_levels(bits_of(CODES))
        given = [words, tables[0], tables[1]]
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(TEXT, OUT + "r,r,r", given, EIGHT, True, 1)
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(_key_steps(), OUT + "r", [words], EIGHT, True, 1)
    return gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))


@gluon.jit
def key_operand(words, tables, CODES: gl.constexpr, MMA: gl.constexpr):
    """float16 [W, keys, D] plus an offset, elements in the order of `in_key_order`. tables: `level_tables` of them."""
    W: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    D: gl.constexpr = words.shape[2] * 8
    RUN: gl.constexpr = run_of(words.shape[2])
    x = elements(words, tables, CODES)
    # [.., row's part, thread, word, then of a code's place in it the lowest bit, the middle one and the upper one]
    x = x.reshape([W, KEYS, D // (32 * RUN), 4, RUN, 2, 2, 2]).permute((0, 1, 2, 4, 6, 7, 3, 5)).reshape([W, KEYS, D])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def in_key_order(x):
    """Rows [N, D] with their elements in the order of `key_operand`."""
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    RUN: gl.constexpr = run_of(D // 8)
    return x.reshape([N, D // (32 * RUN), 4, RUN, 2, 2, 2]).permute((0, 1, 3, 5, 4, 2, 6)).reshape([N, D])


@gluon.constexpr_function
def channel_words(warps, words):
    """Layout of float16 numbers of each channel, two a word [W, D / 2], such that a thread has those of its keys."""
    run = 4 * run_of(words // 4)
    registers = [[0, 1 << i] for i in range(bits(run))] + [[0, 4 * run << i] for i in range(bits(words // (4 * run)))]
    lanes = [[0, run], [0, 2 * run], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0] for i in range(bits(warps))], [], [warps, words])


@gluon.constexpr_function
def _row_pairs(warps, count):
    """Layout [W, 2, 8, count] of an operand's rows as two times eight."""
    registers = [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 8], *([0, 0, 0, 16 << i] for i in range(bits(count // 16)))]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    of_warps = [[1 << i, 0, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 2, 8, count])


@gluon.jit
def channels(words):
    """Words [W, D / 2] of two numbers as float16 [W, D]."""
    a, b = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (gl.float16, gl.float16), True, 1)
    return gl.join(a, b).reshape([words.shape[0], words.shape[1] * 2])


@gluon.jit
def _channel_products(q, words, MMA: gl.constexpr):
    """Products of queries [W, D, R] with a number of each channel, as often as 8 rows, float32 [W, 8, R].

    As they are loaded, four words are an operand's registers: half of them its first eight rows, the others its last
    ones. Each half's elements are multiplied in a product of its own, of which the other's rows have no meaning.
    """
    W: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    R: gl.constexpr = q.shape[2]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    x = in_key_order(channels(words)).reshape([W, D // 32, 2, 16]).permute((0, 2, 1, 3)).reshape([W, 2, D // 2])
    x = gl.convert_layout(x, gl.SliceLayout(2, _row_pairs(W, D // 2)), assert_trivial=True)
    x, _ = gl.broadcast(gl.expand_dims(x, 2), gl.zeros([W, 2, 8, D // 2], gl.float16, _row_pairs(W, D // 2)))
    rows = gl.convert_layout(x.reshape([W, 16, D // 2]), OPERAND, assert_trivial=True)
    first, second = gl.split(q.reshape([W, D // 32, 2, 16, R]).permute((0, 1, 3, 4, 2)))
    nothing = gl.zeros([W, 16, R], gl.float32, MMA)
    first = gl.convert_layout(first.reshape([W, D // 2, R]), q.type.layout, assert_trivial=True)
    second = gl.convert_layout(second.reshape([W, D // 2, R]), q.type.layout, assert_trivial=True)
    of_first, _ = gl.split(mma_v2(rows, first, nothing).reshape([W, 2, 8, R]).permute((0, 2, 3, 1)))
    _, of_second = gl.split(mma_v2(rows, second, nothing).reshape([W, 2, 8, R]).permute((0, 2, 3, 1)))
    return of_first + of_second


@gluon.jit
def _twice(x):
    """[W, N, R] as [W, 2 * N, R]."""
    return gl.join(x, x).permute((0, 3, 1, 2)).reshape([x.shape[0], 2 * x.shape[1], x.shape[2]])


@gluon.jit
def products(codes, first, second, s, MMA: gl.constexpr):
    """s plus products of codes [W, keys, D] with the sum of two operands [W, D, R], of which one alone would round
    queries by more than products do. They take turns, so that no more of `codes` than an instruction takes need be
    there."""
    W: gl.constexpr = codes.shape[0]
    KEYS: gl.constexpr = codes.shape[1]
    D: gl.constexpr = codes.shape[2]
    R: gl.constexpr = first.shape[2]
    a = gl.join(codes, codes).reshape([W, KEYS, D // 16, 16, 2]).permute((0, 1, 2, 4, 3)).reshape([W, KEYS, 2 * D])
    b = gl.join(first, second).reshape([W, D // 16, 16, R, 2]).permute((0, 1, 4, 2, 3)).reshape([W, 2 * D, R])
    a = gl.convert_layout(a, codes.type.layout, assert_trivial=True)
    return mma_v2(a, gl.convert_layout(b, first.type.layout, assert_trivial=True), s)


@gluon.jit
def plus(x, NUMBER: gl.constexpr):
    y = gl.full_like(x, NUMBER)
    return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.float16, True, 2)


@gluon.jit
def times_plus(x, factor, y):
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, y], gl.float16, True, 2)


@gluon.jit
def keys_of_steps(codes, steps, least):
    """Keys [W, keys, D] of codes as `key_operand` has them, which float16 has exactly."""
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(1, codes.type.layout)
    steps = gl.convert_layout(in_key_order(channels(steps)), OF_CHANNELS, assert_trivial=True)
    least = gl.convert_layout(in_key_order(channels(least)), OF_CHANNELS, assert_trivial=True)
    steps, _ = gl.broadcast(gl.expand_dims(steps, 1), codes)
    least, _ = gl.broadcast(gl.expand_dims(least, 1), codes)
    return times_plus(plus(codes, -STEP_OFFSET), steps, least)


@gluon.jit
def step_products(q, steps, least, KEYS: gl.constexpr, MMA: gl.constexpr):
    """Queries [W, D, R] times each channel's step as the sum of two operands, and what products of codes with them lack
    to be those of keys, for KEYS keys, float32 [W, KEYS, R]."""
    base = _channel_products(q, least, MMA) - STEP_OFFSET * _channel_products(q, steps, MMA)
    for _ in gl.static_range(bits(KEYS // 8)):
        base = _twice(base)
    of_dims = gl.convert_layout(in_key_order(channels(steps)), gl.SliceLayout(2, q.type.layout), assert_trivial=True)
    scaled = q * gl.expand_dims(of_dims, 2)
    of_rows, _ = gl.broadcast(gl.expand_dims(of_dims, 2), q)
    return scaled, gl.fma(q, of_rows, -scaled), gl.convert_layout(base, MMA, assert_trivial=True)


@gluon.constexpr_function
def steps_of_halves(selectors):
    """Codes c of two rows' words as pairs of 2c - 15, four for each of the `selectors` of halves, which spaces divide
    (Triton 3.6 takes no tuple of texts): bits of the mantissas of two numbers from 1024 on, four places or none from
    their upper end."""
    selectors = selectors.split()
    n = 8 * len(selectors)
    text = """{ .reg .b32 u, s, x, half, low, small, high;
        mov.b32 half, 0x38003800; mov.b32 low, 0xE01EE01E; mov.b32 small, 0x28002800; mov.b32 high, 0xD1E0D1E0; """
    for at in range(4 * len(selectors)):
        if at % 4 == 0:
            text += f"prmt.b32 u, ${n}, ${n + 1}, {selectors[at // 4]}; "
        if at % 2 == 0:
            text += ("shl.b32 s, u, 2; ", "shr.u32 s, u, 6; ")[at // 2 % 2]
        mask, numbers = ((0x003C003C, "half, low"), (0x03C003C0, "small, high"))[at % 2]
        text += f"lop3.b32 x, s, {mask:#x}, 0x64006400, 0xEA; fma.rn.f16x2 x, x, {numbers}; "
        text += f"mov.b32 {{${2 * at}, ${2 * at + 1}}}, x; "
    return text + "}"


@gluon.constexpr_function
def _value_levels(count):
    """Codes of two rows beside each other, those at even places and those at odd ones, as pairs of levels."""
    text = "{ .reg .b32 a, b, u, x, y, c, k; mov.b32 k, 0x64806480; "
    for odd in range(2):
        if odd:
            text += "shr.u32 c, $16, 4; lop3.b32 c, c, $17, 0x0F0F0F0F, 0xE4; "
        else:
            text += "shl.b32 c, $17, 4; lop3.b32 c, $16, c, 0x0F0F0F0F, 0xE4; "
        text += look_up("c", "$18", "$19", count)
        for at in range(4):
            text += level_pair(at, count, "ab", 2 * (2 * at + odd))
    return text + "}"


@gluon.jit
def value_operand(even, odd, tables, RUN: gl.constexpr, CODES: gl.constexpr, MMA: gl.constexpr):
    """float16 [W, DV, keys] of the words of values at even and at odd places, to be put in order by `in_order`. tables:
    `level_tables` of the ones at even places."""
    LEVELS: gl.constexpr = is_turboquant(CODES)
    OUT: gl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r"
    TEXT: gl.constexpr = _value_levels(bits_of(CODES)) if LEVELS else steps_of_halves("0x5410 0x7632")
    GIVEN: gl.constexpr = OUT + ",r,r" if LEVELS else OUT
    given = [even, odd, tables[0], tables[1]] if LEVELS else [even, odd]
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, r = gl.inline_asm_elementwise(TEXT, GIVEN, given, SIXTEEN, True, 1)
    W: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    WORDS: gl.constexpr = even.shape[2]
    first = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    second = gl.join(gl.join(gl.join(i, j), gl.join(k, m)), gl.join(gl.join(n, o), gl.join(p, r)))
    x = gl.join(first, second).reshape([W, PAIRS, WORDS // (8 * RUN), 8, RUN, 2, 2, 2, 2])
    x = x.permute((0, 2, 4, 8, 7, 6, 3, 1, 5)).reshape([W, 8 * WORDS, 2 * PAIRS])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
