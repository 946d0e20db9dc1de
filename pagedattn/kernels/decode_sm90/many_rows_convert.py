"""Gluon: codes for many rows of queries: a tile's are copied to shared memory, and turned into float16 there, once for
all rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..gluon_device import SMALLEST_SCALE, approximate, bits
from .many_rows_rooms import KEYS, KEYS_OF_WARP, WARPS
from .operands import codes_of_word, elements, key_offset
from .operands_4bit import STEP_OFFSET, channels, level_tables, plus, times_plus
from .spread_codes import is_spread
from .staging import copy_channels, copy_codes, copy_scales, load_channels, load_scales, load_words


@gluon.constexpr_function
def _row_layout(words, codes):
    """Layout of rows [WARPS, KEYS_OF_WARP, words * codes] of which a thread has 16 bytes of codes, four words, at a
    time. Eight threads that follow each other have eight rows: with the swizzle of 128 bytes they use all banks. Where
    there are fewer parts than threads, the upper half of them has the same ones."""
    parts = [[0, 0, 4 * codes << i] for i in range(bits(words // 4))]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], *parts[:2], [0, 8, 0], [0, 0, 0]][:5]
    registers = [[0, 0, 1 << i] for i in range(bits(codes) + 2)] + parts[2:] + [[0, 8, 0]] * (len(parts) > 1)
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, words * codes])


@gluon.constexpr_function
def _number_layout(words, codes):
    """Layout of what rows of words, as operands take them, stand for."""
    each = codes_of_word(codes)
    return _row_layout(words // 2, 2 * each) if is_spread(codes) else _row_layout(words, each)


@gluon.constexpr_function
def _word_layout(words, codes):
    """Layout of rows of words as operands take them."""
    return _row_layout(words // 2, 2) if is_spread(codes) else _row_layout(words, 1)


@gluon.jit
def _numbers(words, tables, CODES: gl.constexpr):
    """float16 [WARPS, KEYS_OF_WARP, D] of words of rows: what the codes stand for, of those in steps the codes."""
    PER_WORD: gl.constexpr = codes_of_word(CODES)
    WORDS: gl.constexpr = words.shape[2]
    x = elements(words, tables, CODES)
    if is_spread(CODES):
        x = x.reshape([WARPS, KEYS_OF_WARP, WORDS // 2, 2, 2, 2, 2]).permute((0, 1, 2, 6, 5, 4, 3))
    elif PER_WORD == 8:
        x = x.permute((0, 1, 2, 5, 4, 3))
    else:
        x = x.permute((0, 1, 2, 4, 3))
    LAYOUT: gl.constexpr = _number_layout(WORDS, CODES)
    x = gl.convert_layout(x.reshape([WARPS, KEYS_OF_WARP, PER_WORD * WORDS]), LAYOUT, assert_trivial=True)
    if CODES == "int4_per_channel":
        x = plus(x, -STEP_OFFSET)
    elif CODES == "rotated_int4":  # 2 c - 15
        x = times_plus(x, gl.full_like(x, 2.0), gl.full_like(x, -2.0 * STEP_OFFSET - 15.0))
    elif key_offset(CODES) != 0:
        x = plus(x, -key_offset(CODES))
    return x


@gluon.jit
def _of_channels(words, x):
    """Words of two channels' numbers as often as there are rows in x."""
    numbers = gl.convert_layout(channels(words), gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    every, _ = gl.broadcast(gl.expand_dims(numbers, 1), x)
    return every


@gluon.jit
def copy_tile(codes, stage, at, block, known, kv_head, low, end, rooms, shape):
    """Begin to copy a tile of which each warp has the keys from `at` on, in `block`, as `known_blocks` has it. codes: a
    head's keys and values, the planes of scales, then strides of blocks of both."""
    key, value, k_scales, v_scales, sk_b, sv_b = codes
    S: gl.constexpr = shape.S
    NEAREST: gl.constexpr = shape.NEAREST
    K_CODES: gl.constexpr = shape.K_CODES
    V_CODES: gl.constexpr = shape.V_CODES
    keys, values = rooms.k_codes.index(stage), rooms.v_codes.index(stage)
    K_SLOT, V_SLOT = shape.K_SLOT, shape.V_SLOT
    copy_codes(keys, key, at, block, known, low, end, sk_b, 0, 1, S, K_SLOT, NEAREST, shape.K_STORED, K_CODES)
    copy_codes(values, value, at, block, known, low, end, sv_b, 0, 1, S, V_SLOT, NEAREST, shape.V_STORED, V_CODES)
    if shape.PER_CHANNEL:
        memory = rooms.of_keys[0].index(stage)
        copy_channels(memory, k_scales, block, known, kv_head, shape.HEAD_DIM, shape.K_STRIDES)
    elif shape.K_SCALED:
        memory = rooms.of_keys[0].index(stage)
        copy_scales(memory, k_scales, at, block, kv_head, S, shape.K_STRIDES)
    if shape.V_STRIDES is not None:
        memory = rooms.of_values[0].index(stage)
        copy_scales(memory, v_scales, at, block, kv_head, S, shape.V_STRIDES)
    async_copy.commit_group()


@gluon.jit
def load_tile(codes, stage, at, block, kv_head, EACH: gl.constexpr, rooms, shape):
    """Words of the keys and the values of a tile that was copied from `at` and `block`, and tuples of what keys and
    values are multiplied by: steps and least elements of channels [WARPS, D / 2], words of two (as float16 they would
    take a register each), or scales [WARPS, KEYS_OF_WARP] in layout EACH."""
    k = load_words(rooms.k_codes.index(stage), _word_layout(shape.K_WORDS, shape.K_CODES), shape.K_CODES)
    v = load_words(rooms.v_codes.index(stage), _word_layout(shape.V_WORDS, shape.V_CODES), shape.V_CODES)
    of_keys = ()
    of_values = ()
    if shape.PER_CHANNEL:
        of_keys = load_channels(rooms.of_keys[0].index(stage), gl.SliceLayout(1, _row_layout(shape.K_WORDS, 4)))
    elif shape.K_SCALED:
        memory = rooms.of_keys[0].index(stage)
        of_keys = (load_scales(memory, codes[2], at, block, kv_head, shape.S, shape.K_STRIDES, EACH),)
    if shape.V_STRIDES is not None:
        memory = rooms.of_values[0].index(stage)
        of_values = (load_scales(memory, codes[3], at, block, kv_head, shape.S, shape.V_STRIDES, EACH),)
    return k, v, of_keys, of_values


@gluon.jit
def store_keys(k, of_keys, of_values, tables, seen, stage, rooms, shape):
    """Keys of `load_tile`, of a stage, as numbers in the place of the tile before, and what both keys and values are
    multiplied by. seen: which keys; of others scales may be anything. tables: `tables_of` them."""
    x = _numbers(k, tables, shape.K_CODES)
    if shape.PER_CHANNEL:
        x = times_plus(x, _of_channels(of_keys[0], x), _of_channels(of_keys[1], x))
    rooms.keys().store(x.reshape([KEYS, shape.D]))
    log = gl.where(seen, 0.0, -float("inf"))
    if shape.K_SCALED:
        rooms.scales.store(gl.where(seen, gl.expand_dims(of_keys[0], 2), 0.0).reshape([KEYS]))
    if shape.V_STRIDES is not None:
        factor = gl.expand_dims(gl.where(of_values[0] < SMALLEST_SCALE, SMALLEST_SCALE, of_values[0]), 2)
        log += gl.where(seen, approximate("lg2", factor), 0.0)
        rooms.inverses.index(stage).store(gl.where(seen, approximate("rcp", factor), 0.0).reshape([KEYS]))
    rooms.logs.store(log.reshape([KEYS]))


@gluon.jit
def store_values(v, tables, rooms, shape):
    """Values of `load_tile` as numbers in the place of the tile before."""
    rooms.values().store(_numbers(v, tables, shape.V_CODES).reshape([KEYS, shape.D]))


@gluon.jit
def tables_of(begin, WORDS: gl.constexpr, CODES: gl.constexpr):
    """`level_tables` of a tile's words."""
    return level_tables(begin, _word_layout(WORDS, CODES), CODES)
