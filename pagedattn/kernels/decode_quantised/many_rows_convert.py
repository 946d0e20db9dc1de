"""Gluon: codes for many rows of queries: a tile's go from memory to registers, and to shared memory as float16, once
for all rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_device import SMALLEST_SCALE, approximate, bits
from .axes import along, in_3d
from .many_rows_rooms import KEYS, KEYS_OF_WARP, WARPS
from .operands import codes_of_word, elements, key_offset
from .operands_4bit import STEP_OFFSET, channels, level_tables


@gluon.constexpr_function
def _row_layout(words, codes):
    """Layout of rows [WARPS, KEYS_OF_WARP, words * codes] of which a thread has 16 bytes of codes, four words, at a
    time. Eight threads that follow each other have eight rows: with the swizzle of 128 bytes they use all banks."""
    parts = [[0, 0, 4 * codes << i] for i in range(bits(words // 4))]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], *parts[:2], [0, 8, 0]][:5]
    registers = [[0, 0, 1 << i] for i in range(bits(codes) + 2)] + parts[2:] + [[0, 8, 0]] * (len(parts) > 1)
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, words * codes])


@gluon.jit
def _plus(x, NUMBER: gl.constexpr):
    y = gl.full_like(x, NUMBER)
    return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.float16, True, 2)


@gluon.jit
def _times_plus(x, factor, y):
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, y], gl.float16, True, 2)


@gluon.jit
def _numbers(words, tables, CODES: gl.constexpr):
    """float16 [WARPS, KEYS_OF_WARP, D] of words of rows: what the codes stand for, of those in steps the codes."""
    PER_WORD: gl.constexpr = codes_of_word(CODES)
    WORDS: gl.constexpr = words.shape[2]
    x = elements(words, tables, CODES)
    if PER_WORD == 8:
        x = x.permute((0, 1, 2, 5, 4, 3))
    else:
        x = x.permute((0, 1, 2, 4, 3))
    LAYOUT: gl.constexpr = _row_layout(WORDS, PER_WORD)
    x = gl.convert_layout(x.reshape([WARPS, KEYS_OF_WARP, PER_WORD * WORDS]), LAYOUT, assert_trivial=True)
    if CODES == "int4_per_channel":
        x = _plus(x, -STEP_OFFSET)
    elif CODES == "rotated_int4":  # 2 c - 15
        x = _times_plus(x, gl.full_like(x, 2.0), gl.full_like(x, -2.0 * STEP_OFFSET - 15.0))
    elif key_offset(CODES) != 0:
        x = _plus(x, -key_offset(CODES))
    return x


@gluon.jit
def _load_channels(k_scales, block, kv_head, shape):
    """Steps and least elements of the channels of each warp's block, [WARPS, D / 2] words of two: as float16 they would
    take a register each."""
    OF_BLOCK: gl.constexpr = gl.SliceLayout(1, _row_layout(shape.K_WORDS, 4))
    COUNT: gl.constexpr = shape.D // 2
    channel = gl.arange(0, COUNT, gl.SliceLayout(0, OF_BLOCK))
    first = gl.convert_layout(block, gl.SliceLayout(1, OF_BLOCK)) * shape.K_STRIDES[0] + kv_head * shape.K_STRIDES[2]
    at = k_scales + gl.expand_dims(first, 1) + gl.expand_dims(channel, 0)
    return gl.load(at), gl.load(at + COUNT)


@gluon.jit
def _of_channels(words, x):
    """Words of two channels' numbers as often as there are rows in x."""
    numbers = gl.convert_layout(channels(words), gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    every, _ = gl.broadcast(gl.expand_dims(numbers, 1), x)
    return every


@gluon.jit
def _near_row(row, at, low, end, shape):
    """Rows [WARPS, KEYS_OF_WARP, 1] of keys at + row, or if NEAREST of the nearest of them in low..end."""
    near = in_3d(row, 1)
    if shape.NEAREST:
        near = gl.minimum(gl.maximum(near, in_3d(low - at, 0)), in_3d(end - 1 - at, 0))
    return near


@gluon.jit
def _load_rows(codes, at, block, low, end, s_block, SLOT: gl.constexpr, WORDS: gl.constexpr, shape):
    """Words of a warp's keys from `at` on, which lie in one block."""
    LAYOUT: gl.constexpr = _row_layout(WORDS, 1)
    row = gl.arange(0, KEYS_OF_WARP, along(1, LAYOUT))
    word = in_3d(gl.arange(0, WORDS, along(2, LAYOUT)), 2)
    at, block = gl.convert_layout(at, along(0, LAYOUT)), gl.convert_layout(block, along(0, LAYOUT))
    first = codes + in_3d(block * s_block + (at % shape.S) * SLOT, 0)
    return gl.load(first + word + _near_row(row, at, low, end, shape) * SLOT)


@gluon.jit
def _load_scales(scales, at, block, row, kv_head, low, end, STRIDES: gl.constexpr, shape):
    """Those of the same rows, of a plane with these strides by block, slot and head: [WARPS, KEYS_OF_WARP, 1]."""
    first = scales + in_3d(block * STRIDES[0] + ((at % shape.S) * STRIDES[1] + kv_head * STRIDES[2]), 0)
    return gl.load(first + _near_row(row, at, low, end, shape) * STRIDES[1]).to(gl.float32)


@gluon.jit
def load_tile(codes, at, block, row, kv_head, low, end, shape):
    """Words of a tile's keys and values, and tuples of what keys and values are multiplied by. codes: a head's keys and
    values and the planes of scales, then strides of blocks of both."""
    key, value, k_scales, v_scales, sk_b, sv_b = codes
    k = _load_rows(key, at, block, low, end, sk_b, shape.K_SLOT, shape.K_WORDS, shape)
    v = _load_rows(value, at, block, low, end, sv_b, shape.V_SLOT, shape.V_WORDS, shape)
    of_keys = ()
    of_values = ()
    if shape.PER_CHANNEL:
        of_keys = _load_channels(k_scales, block, kv_head, shape)
    elif shape.K_STRIDES is not None:
        of_keys = (_load_scales(k_scales, at, block, row, kv_head, low, end, shape.K_STRIDES, shape),)
    if shape.V_STRIDES is not None:
        of_values = (_load_scales(v_scales, at, block, row, kv_head, low, end, shape.V_STRIDES, shape),)
    return k, v, of_keys, of_values


@gluon.jit
def store_tile(k, v, of_keys, of_values, k_tables, v_tables, seen, rooms, shape):
    """What `load_tile` gave, as numbers in the place of the tile before. seen: which keys, [WARPS, KEYS_OF_WARP, 1]; of
    others scales may be anything. Tables: `tables_of` the words."""
    rooms.values().store(_numbers(v, v_tables, shape.V_CODES).reshape([KEYS, shape.D]))
    x = _numbers(k, k_tables, shape.K_CODES)
    if shape.PER_CHANNEL:
        x = _times_plus(x, _of_channels(of_keys[0], x), _of_channels(of_keys[1], x))
    rooms.keys().store(x.reshape([KEYS, shape.D]))
    log = gl.where(seen, 0.0, -float("inf"))
    if shape.K_SCALED:
        rooms.scales.store(gl.where(seen, of_keys[0], 0.0).reshape([KEYS]))
    if shape.V_STRIDES is not None:
        factor = gl.where(of_values[0] < SMALLEST_SCALE, SMALLEST_SCALE, of_values[0])
        log += gl.where(seen, approximate("lg2", factor), 0.0)
        rooms.inverses.store(gl.where(seen, approximate("rcp", factor), 0.0).reshape([KEYS]))
    rooms.logs.store(log.reshape([KEYS]))


@gluon.jit
def tables_of(words, block):
    """`level_tables` of words like these."""
    LAYOUT: gl.constexpr = words.type.layout
    return level_tables(words, in_3d(gl.convert_layout(block, along(0, LAYOUT)), 0))
