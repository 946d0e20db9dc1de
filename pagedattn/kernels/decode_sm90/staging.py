"""Gluon: tiles of codes on their way from memory: copied to shared memory, asynchronously, while the tile before is
attended to, and read from there as words of operands.

Loads to registers did not overlap with the tile before: ptxas issued them at an iteration's end and waited for all of
them, as they share a scoreboard, at the begin of the next one.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import _aggregate as aggregate

from ..gluon_device import bits
from .axes import along, in_3d
from .operands import codes_of_word, key_words, may_be_nan
from .operands_4bit import channel_words
from .spread_codes import has_upper_bits, is_spread, load_spread, memory_words, stored_words

STAGES = gl.constexpr(2)  # the other one is `stage ^ 1`, and one copy is under way
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def _key_memory(words, codes):
    """Layout of rows of `words` words. Four threads read 16 words at a time, eight threads those of two rows beside
    each other, which lie in different halves of the banks. Words that are spread are read in slices."""
    if is_spread(codes):
        return PLAIN.value
    return gl.SwizzledSharedLayout(min(16, words), 1, 2 if words >= 32 else 1, [2, 1, 0])


@gluon.constexpr_function
def _value_memory(words, codes):
    """Layout of rows of `words` words. Two threads read 8 words at a time, eight threads those of four rows beside each
    other, which lie in different banks. Words that are spread are read in slices."""
    if is_spread(codes):
        return PLAIN.value
    parts = words // 8
    return gl.SwizzledSharedLayout(8, max(1, 4 // parts), min(4, parts), [2, 1, 0])


@gluon.constexpr_function
def _by_16_bytes(warps, rows, words, stored):
    """Layout [warps, rows, words] of which a thread copies four words at a time, or two or one where four do not divide
    those that are stored. Where there are fewer than 32 such parts, the lanes beyond them hold the same elements."""
    count = min(stored & -stored, 4)
    parts = [[0, 0, count << i] for i in range(bits(words // count))] + [[0, 1 << i, 0] for i in range(bits(rows))]
    lanes = parts[:5] + [[0, 0, 0]] * (5 - len(parts))
    of_warps = [[1 << i, 0, 0] for i in range(bits(warps))]
    registers = [[0, 0, 1 << i] for i in range(bits(count))] + parts[5:]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, words])


@gluon.constexpr_function
def _one_each(warps, keys):
    """Layout [warps, keys] of which a thread has one."""
    lanes = [[0, 1 << i] if 1 << i < keys else [0, 0] for i in range(5)]
    return gl.DistributedLinearLayout([], lanes, [[1 << i, 0] for i in range(bits(warps))], [], [warps, keys])


@gluon.jit
def copy_rows(
    memory, codes, at, block, known, low, end, s_block, FIRST: gl.constexpr, EVERY: gl.constexpr, S: gl.constexpr,
    SLOT: gl.constexpr, NEAREST: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Begin to copy rows at + FIRST + EVERY * i, of WORDS words, into `memory` [warps, rows, words or more], for each
    warp from its block, `at` and `block` [warps]. If NEAREST, which codes that may be no numbers need, the nearest of
    them in low..end, and zeros of blocks that are not `known`."""
    LAYOUT: gl.constexpr = _by_16_bytes(memory.shape[0], memory.shape[1], memory.shape[2], WORDS)
    at, block = gl.convert_layout(at, along(0, LAYOUT)), gl.convert_layout(block, along(0, LAYOUT))
    row = in_3d(FIRST + EVERY * gl.arange(0, memory.shape[1], along(1, LAYOUT)), 1)
    if NEAREST:
        row = gl.minimum(gl.maximum(row, in_3d(low - at, 0)), in_3d(end - 1 - at, 0))
    word = in_3d(gl.arange(0, memory.shape[2], along(2, LAYOUT)), 2)
    of_thread = codes + (row * SLOT + word)  # the same for all tiles, but for NEAREST
    first = block * s_block + _slot(at, EVERY * memory.shape[1], S) * SLOT
    place = of_thread + in_3d(first, 0)
    there, _ = gl.broadcast(word < WORDS, place)
    if NEAREST:
        known = _each(known, place)
        there = known & there if memory.shape[2] > WORDS else known
    if NEAREST or memory.shape[2] > WORDS:
        async_copy.async_copy_global_to_shared(memory, place, mask=there)
    else:
        async_copy.async_copy_global_to_shared(memory, place)


@gluon.jit
def copy_codes(
    memory, codes, at, block, known, low, end, s_block, FIRST: gl.constexpr, EVERY: gl.constexpr, S: gl.constexpr,
    SLOT: gl.constexpr, NEAREST: gl.constexpr, WORDS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """`copy_rows` of rows of WORDS words as operands take them. Where memory has room for longer rows, upper bits have
    a place of their own behind it."""
    if has_upper_bits(CODES) and memory.shape[2] > WORDS:
        HALF: gl.constexpr = memory.shape[2] // 2
        upper = memory.slice(HALF, HALF // 2, dim=2)
        memory = memory.slice(0, HALF, dim=2)
        copy_rows(memory, codes, at, block, known, low, end, s_block, FIRST, EVERY, S, SLOT, NEAREST, WORDS // 2)
        codes += WORDS // 2
        copy_rows(upper, codes, at, block, known, low, end, s_block, FIRST, EVERY, S, SLOT, NEAREST, WORDS // 4)
    else:
        STORED: gl.constexpr = stored_words(WORDS, CODES)
        copy_rows(memory, codes, at, block, known, low, end, s_block, FIRST, EVERY, S, SLOT, NEAREST, STORED)


@gluon.jit
def copy_channels(memory, plane, block, known, kv_head, HEAD_DIM: gl.constexpr, STRIDES: gl.constexpr):
    """Begin to copy what the channels of a head in warps' blocks have, steps and then least elements, zeros of those
    that are not `known`, into `memory` [warps, 1, words]."""
    COUNT: gl.constexpr = memory.shape[2] // 2
    both = memory.reshape([memory.shape[0], 2, COUNT])
    LAYOUT: gl.constexpr = _by_16_bytes(memory.shape[0], 2, COUNT, HEAD_DIM // 2)
    word = in_3d(gl.arange(0, COUNT, along(2, LAYOUT)), 2)
    which = in_3d(gl.arange(0, 2, along(1, LAYOUT)), 1)
    first = gl.convert_layout(block, along(0, LAYOUT)) * STRIDES[0] + kv_head * STRIDES[2]
    place = plane + (which * (HEAD_DIM // 2) + word) + in_3d(first, 0)
    there = _each(known, place)
    if HEAD_DIM < memory.shape[2]:
        inside, _ = gl.broadcast(word < HEAD_DIM // 2, place)
        there = there & inside
    async_copy.async_copy_global_to_shared(both, place, mask=there)


@gluon.jit
def _each(known, place):
    """Of each element of `place` [warps, ..], which warps are `known`."""
    known = in_3d(gl.convert_layout(known, along(0, place.type.layout)), 0)
    mask, _ = gl.broadcast(known, place)
    return mask


@gluon.jit
def copy_scales(memory, plane, at, block, kv_head, S: gl.constexpr, STRIDES: gl.constexpr):
    """Begin to copy the scales of the same rows into `memory` [warps, rows]: of 16 bits, the words that have them."""
    LAYOUT: gl.constexpr = _one_each(memory.shape[0], memory.shape[1])
    at = gl.expand_dims(gl.convert_layout(at, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    block = gl.expand_dims(gl.convert_layout(block, gl.SliceLayout(1, LAYOUT)), 1)
    place = _scale_at(block, at, kv_head, memory.shape[1], S, STRIDES) + row * STRIDES[1]
    if plane.dtype.element_ty.primitive_bitwidth == 16:
        place = place >> 1
    async_copy.async_copy_global_to_shared(memory, plane.to(gl.pointer_type(gl.int32), bitcast=True) + place)


@gluon.jit
def load_channels(memory, LAYOUT: gl.constexpr):
    """Words of the steps and of the least elements of the channels of warps' blocks, each [warps, D / 2]."""
    COUNT: gl.constexpr = memory.shape[2] // 2
    both = memory.reshape([memory.shape[0], 2 * COUNT])
    return both.slice(0, COUNT, dim=1).load(LAYOUT), both.slice(COUNT, COUNT, dim=1).load(LAYOUT)


@gluon.jit
def load_scales(memory, plane, at, block, kv_head, S: gl.constexpr, STRIDES: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 [warps, rows] of the tile that was copied from `at` and `block`."""
    words = memory.load(LAYOUT)
    if plane.dtype.element_ty.primitive_bitwidth == 16:
        row = gl.expand_dims(gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
        first = _scale_at(block, at, kv_head, memory.shape[1], S, STRIDES).to(gl.int32)
        half = words >> 16 * ((gl.expand_dims(first, 1) + row * STRIDES[1]) & 1)
        found = half.to(gl.int16).to(plane.dtype.element_ty, bitcast=True).to(gl.float32)
    else:
        found = words.to(gl.float32, bitcast=True)
    return found


@gluon.jit
def _slot(at, KEYS: gl.constexpr, S: gl.constexpr):
    """Of a block of S, the slot of a warp's first key, of KEYS."""
    if S == KEYS:
        slot = at * 0
    else:
        slot = at % S
    return slot


@gluon.jit
def _scale_at(block, at, kv_head, KEYS: gl.constexpr, S: gl.constexpr, STRIDES: gl.constexpr):
    return block * STRIDES[0] + (_slot(at, KEYS, S) * STRIDES[1] + kv_head * STRIDES[2])


@gluon.jit
def head_offset(kv_head, stride, ALIGNED: gl.constexpr):
    """Where a head's words begin: at a multiple of ALIGNED, of which Triton knows by itself only where 16 divides the
    stride: heads of 64 with codes of 4 bits have 8."""
    return gl.multiple_of(kv_head.to(gl.int64) * stride, ALIGNED)


@gluon.jit
def load_words(memory, LAYOUT: gl.constexpr, CODES: gl.constexpr):
    """A tile's words in LAYOUT, as operands take them."""
    if is_spread(CODES):
        words = load_spread(memory, CODES, LAYOUT)
    else:
        words = memory.load(LAYOUT)
    return words


@aggregate
class Staging:
    """A head's codes in memory, and shared memory for two tiles of them: W warps with KEYS keys each, values at even
    and at odd places apart.

    key, value: a head's; k_scales, v_scales: planes, each with its shared memory, () where there are none. K_WORDS,
    V_WORDS: of a row, as operands take them; K_STORED, V_STORED: those of them that have elements of a head. S slots of
    a block; other constants as of `kernel._decode_kernel`.
    """

    key: gl.tensor
    value: gl.tensor
    k_scales: gl.tuple
    v_scales: gl.tuple
    kv_head: gl.tensor
    sk_b: gl.tensor
    sv_b: gl.tensor
    keys: gl.shared_memory_descriptor
    even: gl.shared_memory_descriptor
    odd: gl.shared_memory_descriptor
    W: gl.constexpr
    KEYS: gl.constexpr
    S: gl.constexpr
    K_SLOT: gl.constexpr
    V_SLOT: gl.constexpr
    K_STRIDES: gl.constexpr
    V_STRIDES: gl.constexpr
    K_CODES: gl.constexpr
    V_CODES: gl.constexpr
    K_WORDS: gl.constexpr
    V_WORDS: gl.constexpr
    HEAD_DIM: gl.constexpr
    K_STORED: gl.constexpr
    V_STORED: gl.constexpr
    PER_CHANNEL: gl.constexpr
    NEAREST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, codes, k_scales, v_scales, kv_head, memory, WORDS, DIMS, W, KEYS, S, SLOTS, STRIDES, CODES):
        # What is in a tuple comes as a constexpr, of None too.
        WORDS, DIMS, SLOTS, STRIDES, CODES = (
            [getattr(x, "value", x) for x in one] for one in (WORDS, DIMS, SLOTS, STRIDES, CODES)
        )
        self.key, self.value, self.sk_b, self.sv_b = codes
        self.k_scales, self.v_scales, self.kv_head = k_scales, v_scales, kv_head
        self.keys, self.even, self.odd = memory
        self.W, self.KEYS, self.S = (gl.constexpr(x) for x in (W, KEYS, S))
        self.K_SLOT, self.V_SLOT = (gl.constexpr(x) for x in SLOTS)
        self.K_STRIDES, self.V_STRIDES = (gl.constexpr(x) for x in STRIDES)
        self.K_CODES, self.V_CODES = (gl.constexpr(x) for x in CODES)
        self.K_WORDS, self.V_WORDS = (gl.constexpr(x) for x in WORDS)
        self.HEAD_DIM = gl.constexpr(DIMS[0])
        stored = (dim // codes_of_word(of) for dim, of in zip(DIMS, CODES, strict=True))
        self.K_STORED, self.V_STORED = (gl.constexpr(x) for x in stored)
        self.PER_CHANNEL = gl.constexpr(CODES[0] == "int4_per_channel")
        self.NEAREST = gl.constexpr(may_be_nan(CODES[0]) or may_be_nan(CODES[1]))

    @gluon.jit
    def copy(self, stage, at, block, known, low, end):
        """Begin to copy the tile of which each warp has the keys from `at` on, in `block`, as `known_blocks` has it,
        all [W]. Codes that may be no numbers are those of the nearest keys in low..end."""
        S: gl.constexpr = self.S
        NEAREST: gl.constexpr = self.NEAREST
        keys, even, odd = self.keys.index(stage), self.even.index(stage), self.odd.index(stage)
        value, sv_b, V_SLOT = self.value, self.sv_b, self.V_SLOT
        K_STORED: gl.constexpr = self.K_STORED
        V_STORED: gl.constexpr = self.V_STORED
        K_CODES: gl.constexpr = self.K_CODES
        V_CODES: gl.constexpr = self.V_CODES
        sk_b, K_SLOT = self.sk_b, self.K_SLOT
        copy_codes(keys, self.key, at, block, known, low, end, sk_b, 0, 1, S, K_SLOT, NEAREST, K_STORED, K_CODES)
        copy_codes(even, value, at, block, known, low, end, sv_b, 0, 2, S, V_SLOT, NEAREST, V_STORED, V_CODES)
        copy_codes(odd, value, at, block, known, low, end, sv_b, 1, 2, S, V_SLOT, NEAREST, V_STORED, V_CODES)
        if self.PER_CHANNEL:
            plane, memory = self.k_scales
            copy_channels(memory.index(stage), plane, block, known, self.kv_head, self.HEAD_DIM, self.K_STRIDES)
        elif self.K_STRIDES is not None:
            plane, memory = self.k_scales
            copy_scales(memory.index(stage), plane, at, block, self.kv_head, S, self.K_STRIDES)
        if self.V_STRIDES is not None:
            plane, memory = self.v_scales
            copy_scales(memory.index(stage), plane, at, block, self.kv_head, S, self.V_STRIDES)
        async_copy.commit_group()

    @gluon.jit
    def load_keys(self, stage):
        """Words of keys, as `operands.key_operand` takes them."""
        return load_words(self.keys.index(stage), key_words(self.W, self.KEYS, self.K_WORDS), self.K_CODES)

    @gluon.jit
    def load_values(self, stage, LAYOUT: gl.constexpr):
        """Words of values at even and at odd places in LAYOUT, as `operands.value_operand` takes them, or that of
        `warpgroup_values`."""
        even = load_words(self.even.index(stage), LAYOUT, self.V_CODES)
        return even, load_words(self.odd.index(stage), LAYOUT, self.V_CODES)

    @gluon.jit
    def load_channels(self, stage):
        """As the function `load_channels`, for products of codes."""
        memory = self.k_scales[1].index(stage)
        return load_channels(memory, channel_words(self.W, memory.shape[2] // 2))

    @gluon.jit
    def load_key_scales(self, stage, at, block, MMA: gl.constexpr):
        """Scales [W, KEYS, 1] of the tile that was copied from `at` and `block`, for products of layout MMA."""
        return self._load_scales(stage, self.k_scales, at, block, self.K_STRIDES, MMA)

    @gluon.jit
    def load_value_scales(self, stage, at, block, MMA: gl.constexpr):
        """As `load_key_scales`, of values."""
        return self._load_scales(stage, self.v_scales, at, block, self.V_STRIDES, MMA)

    @gluon.jit
    def _load_scales(self, stage, scales, at, block, STRIDES: gl.constexpr, MMA: gl.constexpr):
        plane, memory = scales
        LAYOUT: gl.constexpr = gl.SliceLayout(2, MMA)
        found = load_scales(memory.index(stage), plane, at, block, self.kv_head, self.S, STRIDES, LAYOUT)
        return gl.expand_dims(found, 2)


@gluon.jit
def staging_of(
    key, value, k_scale_cache, v_scale_cache, kv_head, sk_b, sk_h, sv_b, sv_h, ALIGNED: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, DIMS: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr, SLOTS: gl.constexpr,
    STRIDES: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """A program's staging. DIMS: elements of stored keys and values, at most D and DV, which operands have."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WORDS: gl.constexpr = (D // codes_of_word(CODES[0]), DV // codes_of_word(CODES[1]))
    K_ROW: gl.constexpr = memory_words(WORDS[0], CODES[0])
    V_ROW: gl.constexpr = memory_words(WORDS[1], CODES[1])
    V_MEMORY: gl.constexpr = _value_memory(V_ROW, CODES[1])
    memory = (
        gl.allocate_shared_memory(gl.int32, [STAGES, W, KEYS, K_ROW], _key_memory(K_ROW, CODES[0])),
        gl.allocate_shared_memory(gl.int32, [STAGES, W, KEYS // 2, V_ROW], V_MEMORY),
        gl.allocate_shared_memory(gl.int32, [STAGES, W, KEYS // 2, V_ROW], V_MEMORY),
    )
    k_scales = ()
    v_scales = ()
    if CODES[0] == "int4_per_channel":
        k_scales = (k_scale_cache, gl.allocate_shared_memory(gl.int32, [STAGES, W, 1, D], PLAIN))
    elif k_scale_cache is not None:
        k_scales = (k_scale_cache, gl.allocate_shared_memory(gl.int32, [STAGES, W, KEYS], FLAT))
    if v_scale_cache is not None:
        v_scales = (v_scale_cache, gl.allocate_shared_memory(gl.int32, [STAGES, W, KEYS], FLAT))
    key += head_offset(kv_head, sk_h, ALIGNED)
    value += head_offset(kv_head, sv_h, ALIGNED)
    codes = (key, value, sk_b, sv_b)
    return Staging(codes, k_scales, v_scales, kv_head, memory, WORDS, DIMS, W, KEYS, S, SLOTS, STRIDES, CODES)
