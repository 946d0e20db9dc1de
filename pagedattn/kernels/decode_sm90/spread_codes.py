"""Gluon: codes of 2 or 3 bits spread to places of 4, so that they become operands as codes of 4 bits do.

A row has words of 16 lower two bits, and of 3 bits, after them, half words of 16 upper ones. Each word, with its half
word, makes two words of eight places: one of the codes at even places and one of those at odd ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def is_spread(codes):
    return codes in ("turboquant3", "turboquant2")


@gluon.constexpr_function
def has_upper_bits(codes):
    return codes == "turboquant3"


@gluon.constexpr_function
def stored_words(words, codes):
    """Of a row of so many words as operands take them, those that are stored."""
    return words * 3 // 4 if has_upper_bits(codes) else words // 2 if is_spread(codes) else words


@gluon.constexpr_function
def memory_words(words, codes):
    """The same of its place in shared memory."""
    return words if has_upper_bits(codes) else stored_words(words, codes)


@gluon.constexpr_function
def _in_pairs(layout):
    """A layout of words [W, rows, words] as one of [W, rows, words / 2, 2]."""

    def apart(bases):
        return [[warp, row, word // 2, word % 2] for warp, row, word in bases]

    bases = (apart(one) for one in (layout.reg_bases, layout.lane_bases, layout.warp_bases))
    warps, rows, words = layout.shape
    return gl.DistributedLinearLayout(*bases, [], [warps, rows, words // 2, 2])


@gluon.constexpr_function
def _packed(layout):
    """Layout of words of which each makes two in `layout`."""

    def halved(bases):
        return [[warp, row, word // 2] for warp, row, word in bases]

    registers = [one for one in halved(layout.reg_bases) if any(one)]
    warps, rows, words = layout.shape
    lanes, of_warps = halved(layout.lane_bases), halved(layout.warp_bases)
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, words // 2])


@gluon.jit
def _twice(words, LAYOUT: gl.constexpr):
    """Words [W, rows, words] as [W, rows, words, 1], and 0 and 1 as [1, 1, 1, 2], of which both make such in LAYOUT."""
    IN_PAIRS: gl.constexpr = _in_pairs(LAYOUT)
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, IN_PAIRS))))
    odd = gl.expand_dims(gl.expand_dims(gl.expand_dims(odd, 0), 0), 0)
    words = gl.convert_layout(words, gl.SliceLayout(3, IN_PAIRS), assert_trivial=True)
    return gl.expand_dims(words, 3), odd


@gluon.jit
def _joined(x, LAYOUT: gl.constexpr):
    return gl.convert_layout(x.reshape(LAYOUT.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def load_spread(memory, CODES: gl.constexpr, LAYOUT: gl.constexpr):
    """Words in LAYOUT of rows in shared memory."""
    PACKED: gl.constexpr = _packed(LAYOUT)
    WORDS: gl.constexpr = PACKED.shape[2]
    words, odd = _twice(memory.slice(0, WORDS, dim=2).load(PACKED), LAYOUT)
    x = (words >> 2 * odd) & 0x33333333
    if has_upper_bits(CODES):
        of_two, second = _twice(memory.slice(WORDS, WORDS // 2, dim=2).load(_packed(PACKED)), PACKED)
        # Of a half word two bits to each place: those of the codes that both words have there.
        pairs = gl.inline_asm_elementwise(
            """{ .reg .b32 x, y; prmt.b32 x, $1, 0, $2;
            shl.b32 y, x, 4; or.b32 x, x, y; and.b32 x, x, 0x0F0F0F0F;
            shl.b32 y, x, 2; or.b32 x, x, y; and.b32 $0, x, 0x33333333; }""",
            "=r,r,r",
            [of_two, 0x4140 + 0x0202 * second],
            gl.int32,
            True,
            1,
        )
        pairs, _ = _twice(_joined(pairs, PACKED), LAYOUT)
        x |= (pairs << 2 - odd) & 0x44444444
    return _joined(x, LAYOUT)


@gluon.jit
def in_spread_order(x, CODES: gl.constexpr):
    """Rows [N, D] with their elements in the order of words that were spread."""
    if is_spread(CODES):
        x = x.reshape([x.shape[0], x.shape[1] // 16, 8, 2]).permute((0, 1, 3, 2)).reshape([x.shape[0], x.shape[1]])
    return x


@gluon.jit
def in_stored_order(x, CODES: gl.constexpr):
    """Rows [N, D] as they were before `in_spread_order`."""
    if is_spread(CODES):
        x = x.reshape([x.shape[0], x.shape[1] // 16, 2, 8]).permute((0, 1, 3, 2)).reshape([x.shape[0], x.shape[1]])
    return x
