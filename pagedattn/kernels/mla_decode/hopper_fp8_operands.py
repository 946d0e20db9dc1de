"""Gluon: e4m3 codes of latent rows in shared memory, read as the first operands of products on Hopper (wgmma).

Products are transposed, S^T = K Q^T and O^T = V^T P^T, and their first operand comes from registers. Which channel of a
row stands at an index of K's inner dimension is free, as long as the queries agree, and which one at an index of V^T's
outer dimension too. So the indices are chosen such that the words of four codes that a thread reads are what its part
of an operand needs: codes are read once for each product and converted in their thread. Which keys a thread reads is
left as it is: with the swizzle of 128 bytes threads that access shared memory together use no bank twice.

K's operand holds pairs of a row's channels; V^T's holds pairs of keys, which two words are interleaved to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import bits
from ..gluon_e4m3 import elements, pairs
from .hopper_items import HALF, KEYS, LATENT

WARPS = gl.constexpr(4)
PANEL = gl.constexpr(128)  # channels that lie beside each other in shared memory, a group of `fp8_ds_mla`
PANELS = gl.constexpr(LATENT.value // PANEL.value)
SOME_KEYS = gl.constexpr(16)  # whose values are an operand at a time
_EIGHT = gl.constexpr((gl.float16,) * 8)


@gluon.constexpr_function
def key_words(words):
    """Layout of words [KEYS, words] of keys, a fourth of them in a thread beside each other."""
    run = words // 4
    registers = [*([0, 1 << i] for i in range(bits(run))), [8, 0]]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [KEYS.value, words])


@gluon.constexpr_function
def value_words():
    """Layout of words [SOME_KEYS, HALF / 4] of values: of a warp 64 channels, of a thread two words of each key."""
    registers = [[0, 1], [1, 0], [8, 0]]
    lanes = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]]
    warps = [[0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [SOME_KEYS.value, HALF.value // 4])


@gluon.constexpr_function
def factor_words():
    """Layout of words [SOME_KEYS / 2, HALF / PANEL, PANEL / 4] beside those of `value_words`: one of each pair of
    keys."""
    registers = [[0, 0, 1], [4, 0, 0]]
    lanes = [[1, 0, 0], [2, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    shape = [SOME_KEYS.value // 2, HALF.value // PANEL.value, PANEL.value // 4]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 16], [0, 1, 0]], [], shape)


@gluon.jit
def _scaled_pairs(even, odd, factor):
    """As `gluon_e4m3.pairs`, times two float16 of a word, one for each key."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, x; .reg .b16 a, b;
        prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
        mov.b32 {a, b}, p; cvt.rn.f16x2.e4m3x2 x, a; mul.rn.f16x2 x, x, $10; mov.b32 {$0, $1}, x;
        cvt.rn.f16x2.e4m3x2 x, b; mul.rn.f16x2 x, x, $10; mov.b32 {$2, $3}, x;
        mov.b32 {a, b}, q; cvt.rn.f16x2.e4m3x2 x, a; mul.rn.f16x2 x, x, $10; mov.b32 {$4, $5}, x;
        cvt.rn.f16x2.e4m3x2 x, b; mul.rn.f16x2 x, x, $10; mov.b32 {$6, $7}, x; }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [even, odd, factor],
        _EIGHT,
        True,
        1,
    )


@gluon.jit
def key_operand(words, MMA: gl.constexpr):
    """Words [KEYS, n] as float16 [KEYS, 4 n], channels in the order of `in_key_order`."""
    a, b, c, d = elements(words)
    N: gl.constexpr = words.shape[1]
    x = gl.join(gl.join(a, b), gl.join(c, d)).reshape([KEYS, 4, N // 4, 2, 2]).permute((0, 2, 4, 1, 3))
    return gl.convert_layout(x.reshape([KEYS, 4 * N]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def halves_of(words):
    """Words [KEYS, n] of keys as two parts, [KEYS, n / 2], that follow each other in the order of `in_key_order`."""
    N: gl.constexpr = words.shape[1]
    x = words.reshape([KEYS, 4, 2, N // 8]).permute((0, 1, 3, 2)).reshape([KEYS, N // 2, 2])
    return gl.split(x)


@gluon.jit
def in_key_order(q, WIDTH: gl.constexpr):
    """Queries [n, channels], which keys are multiplied with by WIDTH channels at a time, in the order of those."""
    N: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    x = q.reshape([N, D // WIDTH, 4, WIDTH // 16, 2, 2]).permute((0, 1, 3, 4, 2, 5))
    return x.reshape([N, D])


@gluon.jit
def value_operand(words, factor, MMA: gl.constexpr):
    """Words [SOME_KEYS, HALF / 4] as float16 [HALF, SOME_KEYS], channels to be put in order by `in_order`.
    factor: None, or words of two float16 for each pair of keys in the layout `factor_words`, to multiply codes with."""
    PAIRS: gl.constexpr = SOME_KEYS // 2
    WORDS: gl.constexpr = HALF // 4
    even, odd = gl.split(words.reshape([PAIRS, 2, WORDS]).permute((0, 2, 1)))
    if factor is None:
        a, b, c, d, e, f, g, h = pairs(even, odd)
    else:
        FACTORS: gl.constexpr = factor_words()
        even = gl.convert_layout(even.reshape([PAIRS, HALF // PANEL, PANEL // 4]), FACTORS, assert_trivial=True)
        odd = gl.convert_layout(odd.reshape([PAIRS, HALF // PANEL, PANEL // 4]), FACTORS, assert_trivial=True)
        a, b, c, d, e, f, g, h = _scaled_pairs(even, odd, factor)
    x = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    x = x.reshape([PAIRS, 4, 8, 2, 2, 2, 2]).permute((3, 6, 1, 5, 2, 0, 4)).reshape([HALF, SOME_KEYS])
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.constexpr_function
def output_layout(rows):
    """Layout of outputs [HALF, rows], as `in_order` has them in a thread: eight channels beside each other."""
    registers = [[1, 0], [2, 0], [4, 0], [0, 1], *([0, 8 << i] for i in range(bits(rows // 8)))]
    lanes = [[0, 2], [0, 4], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[64, 0], [128, 0]], [], [HALF.value, rows])


@gluon.jit
def in_order(acc):
    """Outputs [HALF, rows] of products whose first operands are `value_operand`s."""
    ROWS: gl.constexpr = acc.shape[1]
    x = acc.reshape([2, 2, 4, 2, 8, ROWS]).permute((2, 4, 0, 1, 3, 5)).reshape([HALF, ROWS])
    LAYOUT: gl.constexpr = output_layout(ROWS)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
