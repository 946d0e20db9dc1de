"""Gluon: the warps that convert codes of 8 and 4 bits for prefill on Hopper; others have loaded them.

They become float16, which has every code and probabilities. Keys that queries are split for need no conversion
(`queries`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..gluon_device import bits
from ..gluon_names import reinterpret
from .scale_planes import CHANNEL_KEYS
from .work_item import has_four_bits, take, tiles_of


# One copy of their code: a copy for each warp was slow to fetch, 18 cycles an instruction.
@gluon.constexpr_function
def converters(shape):
    """How many warps."""
    return 4 if shape.CONVERT_KEYS else 2


@gluon.constexpr_function
def _rows_at_once(shape):
    """That a warp converts of a tile at a time. More where converting is what limits the kernel, and it has the
    registers: loads are waited for less often, and so are all warps, as the compiler has it between two stores."""
    return 16 if has_four_bits(shape.V_CODES) else 8


@gluon.constexpr_function
def word_layout(words, warps, rows):
    """Layout of words [rows * warps, words] of four or eight codes. Eight threads, which access shared memory together,
    have four chunks of 16 bytes in each of two rows whose numbers differ in bits 0 and 2: so they use no bank twice
    (D 128), neither to read codes nor to write elements, both of them swizzled."""
    rounds = [[8 * warps << i, 0] for i in range(bits(rows // 8))]
    registers = [[0, 1], [0, 2], *([0, 16 << i] for i in range(bits(words // 16))), *rounds]
    lanes, apart = [[0, 4], [0, 8], [5, 0], [2, 0], [4, 0]], [[8 << i, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, apart, [], [rows * warps, words])


@gluon.constexpr_function
def _eight_codes(times, less, last):
    """Eight codes c of a word as pairs of times * (1024 + 4c), or 1024 + 64c of the upper one, and less, and then
    what `last` says of the i-th pair x."""
    text = f"""{{ .reg .b32 s, t, x, times, less; mov.b32 times, {times:#x}; mov.b32 less, {less:#x};
        shl.b32 s, $4, 2; shr.u32 t, $4, 14; """
    for i in range(4):
        text += f"prmt.b32 x, {'st'[i // 2]}, 0, {(0x1010, 0x2121)[i % 2]:#x}; "
        text += "lop3.b32 x, x, 0x03C0003C, 0x64006400, 0xEA; fma.rn.f16x2 x, x, times, less; "
        text += last.replace("#", str(i)).replace("@", str(5 + i)).replace("%", str(9 + i))
    return text + "}"


# 2c - 15, times $5; and c, times a step of each channel, and its least element.
_EIGHT_LEVELS = gl.constexpr(_eight_codes(0x28003800, 0xD1E0E01E, "mul.rn.f16x2 $#, x, $5; "))
_EIGHT_STEPS = gl.constexpr(_eight_codes(0x24003400, 0xCC00DC00, "fma.rn.f16x2 $#, x, $@, $%; "))


@gluon.jit
def _elements(words, factors, CODES: gl.constexpr):
    """Words [rows, n] of four codes, or eight of 4 bits, as words [rows, 2 n or 4 n] of two float16; int8 and 4 bits
    times factors [rows], float32."""
    if CODES == "e4m3":
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b16 a, b;
            mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=&r,=r,r",
            [words],
            (gl.int32, gl.int32),
            True,
            1,
        )
    elif CODES == "int8":  # (1024 + (code + 128)) factors less 1152 factors, both exact: factors have four bits
        pairs, less = gl.inline_asm_elementwise(
            """{ .reg .b32 o; mov.b32 o, 0xE480E480; cvt.rn.f16x2.f32 $0, $2, $2; mul.rn.f16x2 $1, $0, o; }""",
            "=r,=r,r",
            [factors],
            (gl.int32, gl.int32),
            True,
            1,
        )
        pairs, _ = gl.broadcast(gl.expand_dims(pairs, 1), words)
        less, _ = gl.broadcast(gl.expand_dims(less, 1), words)
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b32 x, k; mov.b32 k, 0x64646464; xor.b32 x, $2, 0x80808080;
            prmt.b32 $0, x, k, 0x4140; fma.rn.f16x2 $0, $0, $3, $4;
            prmt.b32 $1, x, k, 0x4342; fma.rn.f16x2 $1, $1, $3, $4; }""",
            "=&r,=&r,r,r,r",
            [words, pairs, less],
            (gl.int32, gl.int32),
            True,
            1,
        )
    elif has_four_bits(CODES):
        pairs = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [factors], gl.int32, True, 1)
        pairs, _ = gl.broadcast(gl.expand_dims(pairs, 1), words)
        types: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
        a, b, c, d = gl.inline_asm_elementwise(_EIGHT_LEVELS, "=&r,=&r,=&r,=r,r,r", [words, pairs], types, True, 1)
        low, high = gl.join(a, c), gl.join(b, d)
    else:  # e5m2: the upper byte of a float16
        low, high = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
            "=&r,=r,r",
            [words],
            (gl.int32, gl.int32),
            True,
            1,
        )
    EACH: gl.constexpr = 4 if has_four_bits(CODES) else 2
    return gl.join(low, high).reshape([words.shape[0], EACH * words.shape[1]])


@gluon.constexpr_function
def _channel_layouts():
    """For heads of 128: layouts of words [128, 16], of which threads have one in every second row of 32, and of what
    channels of each 32 rows have, 64 words of steps and 64 of least elements: those of their own word."""
    word = [[0, 1], [0, 2], [0, 4], [0, 8]]
    words = [[2, 0], [4, 0], [8, 0], [16, 0]], [*word, [1, 0]], [[32, 0], [64, 0]], [], [128, 16]
    pairs = [[1], [2], [64]], [[4], [8], [16], [32], [0]], [[128], [256]], [], [512]
    return gl.DistributedLinearLayout(*words), gl.DistributedLinearLayout(*pairs)


@gluon.jit
def _of_words(pairs, words):
    """Of pairs [groups, n, 4] the four of each word, as words [groups, keys, n] have them."""
    even, odd = gl.split(pairs.reshape([pairs.shape[0], pairs.shape[1], 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    each = (a, b, c, d)
    result = ()
    for i in gl.static_range(4):
        one = gl.convert_layout(each[i], gl.SliceLayout(1, words.type.layout), assert_trivial=True)
        one, _ = gl.broadcast(gl.expand_dims(one, 1), words)
        result = result + (one,)  # noqa: RUF005 - no stars in a kernel
    return result


@gluon.jit
def _channel_elements(words, channels):
    """Words [groups, keys, n] of eight codes as words [groups * keys, 4 n] of two float16. channels [groups * 8 n]: of
    each group words of two steps, and of two least elements."""
    GROUPS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    COUNT: gl.constexpr = words.shape[2]
    steps, least = gl.split(channels.reshape([GROUPS, 2, COUNT, 4]).permute((0, 2, 3, 1)))
    s = _of_words(steps, words)
    m = _of_words(least, words)
    types: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    wanted: gl.constexpr = "=&r,=&r,=&r,=r,r,r,r,r,r,r,r,r,r"
    operands = [words, s[0], s[1], s[2], s[3], m[0], m[1], m[2], m[3]]
    a, b, c, d = gl.inline_asm_elementwise(_EIGHT_STEPS, wanted, operands, types, True, 1)
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([GROUPS * KEYS, 4 * COUNT])


@gluon.jit
def _convert_channels(n, c, staging, target, rooms, shape):
    """Codes [BLOCK_N, D] of the n-th use of the staging ring, keys of the c-th tile, as what they stand for."""
    COUNT: gl.constexpr = shape.D // 8
    LAYOUTS: gl.constexpr = _channel_layouts()
    WORDS: gl.constexpr = LAYOUTS[0]
    CHANNELS: gl.constexpr = LAYOUTS[1]
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    CODE_WORDS: gl.constexpr = gl.NVMMASharedLayout(4 * COUNT, element_bitwidth=32, rank=2)
    staging.wait_full(n)
    source = reinterpret(staging.tile(n), gl.int32, [shape.BLOCK_N, COUNT], CODE_WORDS)
    words = source.load(WORDS).reshape([shape.BLOCK_N // CHANNEL_KEYS, CHANNEL_KEYS, COUNT])
    channels = rooms.channels.index(c % rooms.channels.shape[0]).load(CHANNELS)
    target = reinterpret(target, gl.int32, [shape.BLOCK_N, shape.D // 2], PAIRS)
    target.store(_channel_elements(words, channels))
    fence_async_shared()
    staging.release(n)  # as in `_convert`


@gluon.jit
def _convert(n, staging, target, rooms, begin, end, CODES: gl.constexpr, shape):
    """Codes [BLOCK_N, D] of the n-th use of the staging ring as elements, int8 times the factors of that use, which are
    0 of rows outside begin..end; others become 0 there: their weights are 0, but 0 * NaN would reach the output."""
    COUNT: gl.constexpr = shape.D // (8 if has_four_bits(CODES) else 4)
    EACH: gl.constexpr = _rows_at_once(shape)
    WORDS: gl.constexpr = word_layout(COUNT, converters(shape), EACH)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    CODE_WORDS: gl.constexpr = gl.NVMMASharedLayout(min(4 * COUNT, 128), element_bitwidth=32, rank=2)
    ROWS: gl.constexpr = converters(shape) * EACH
    ROUNDS: gl.constexpr = shape.BLOCK_N // ROWS
    staging.wait_full(n)
    source = reinterpret(staging.tile(n), gl.int32, [shape.BLOCK_N, COUNT], CODE_WORDS)
    target = reinterpret(target, gl.int32, [shape.BLOCK_N, shape.D // 2], PAIRS)
    index = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))
    for i in gl.static_range(ROUNDS):
        words = source.slice(i * ROWS, ROWS).load(WORDS)
        of_rows = None
        if shape.TOKEN_SCALES:
            of_rows = rooms.factors.index(n % staging.STAGES).slice(i * ROWS, ROWS).load(gl.SliceLayout(1, WORDS))
        else:
            live = (index >= begin - i * ROWS) & (index < end - i * ROWS)
            words = gl.where(gl.expand_dims(live, 1), words, 0)
        target.slice(i * ROWS, ROWS).store(_elements(words, of_rows, CODES))
    fence_async_shared()
    # Once what was loaded is stored: a release's barrier does not wait for loads, and copies overtake them.
    staging.release(n)


@gluon.jit
def convert_codes(staging, rooms, channels, shape):
    """Converts the values of every item handed out, and the keys where shape says so. rooms: `scale_planes.ScaleRooms`,
    where tokens have scales."""
    n = 0
    c = 0
    item = take(channels.items, n, converters(shape), shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        for back in range(0, high - low):
            key = (high - 1 - back) * shape.BLOCK_N
            begin = 0
            if shape.WINDOW > 0:  # rows whose blocks the window may have left to others
                begin = item.first - shape.WINDOW + 1 - key
            if shape.CONVERT_KEYS:
                channels.k.wait_empty(c)
                if shape.CHANNEL_SCALES:
                    _convert_channels(2 * c, c, staging, channels.k.tile(c), rooms, shape)
                else:
                    _convert(2 * c, staging, channels.k.tile(c), rooms, begin, item.keys - key, shape.CODES, shape)
                mbarrier.arrive(channels.k.barrier(c), count=1)
            channels.wait_empty_values(c)
            at = c * shape.PER_TILE + shape.PER_TILE - 1
            _convert(at, staging, channels.v.tile(c), rooms, begin, item.keys - key, shape.V_CODES, shape)
            mbarrier.arrive(channels.v.barrier(c), count=1)
            c += 1
        n += 1
        item = take(channels.items, n, converters(shape), shape)
