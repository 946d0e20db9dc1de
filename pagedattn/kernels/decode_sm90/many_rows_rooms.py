"""Gluon: what the kernel for many rows is compiled for, and its shared memory."""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ..gluon_device import tile_layout
from ..gluon_names import reinterpret
from ..masking import sees_first_keys
from .operands import codes_of_word, is_turboquant, may_be_nan, sink_exponent
from .spread_codes import is_spread, memory_words
from .staging import PLAIN, STAGES

WARPS = gl.constexpr(4)
KEYS = gl.constexpr(64)  # of a tile
KEYS_OF_WARP = gl.constexpr(16)  # that lie in one block


@aggregate
class Shape:
    """What the kernel is compiled for: query blocks of R rows, G heads of each token, of KV_HEADS of the cache.

    S slots of a block; D elements of keys and of values as operands take them, of which HEAD_DIM are stored, *_STORED
    words of *_WORDS; *_CODES, *_STRIDES and *_SLOT as of `kernel._decode_kernel`.
    LOGITS [R, KEYS] and OUTPUT [R, D] are the layouts of products, MINE that of outputs when they are written. ROTATED:
    queries are, so that float16 rounds them. PER_CHANNEL, K_SCALED: what keys are multiplied by.
    """

    R: gl.constexpr
    G: gl.constexpr
    KV_HEADS: gl.constexpr
    S: gl.constexpr
    D: gl.constexpr
    HEAD_DIM: gl.constexpr
    OVERHEAD: gl.constexpr
    CHUNK: gl.constexpr
    MASK: gl.constexpr
    SOFTCAP: gl.constexpr
    K_CODES: gl.constexpr
    V_CODES: gl.constexpr
    K_STRIDES: gl.constexpr
    V_STRIDES: gl.constexpr
    K_SLOT: gl.constexpr
    V_SLOT: gl.constexpr
    BLOCK_Q: gl.constexpr
    KEYS: gl.constexpr
    LOGITS: gl.constexpr
    OUTPUT: gl.constexpr
    MINE: gl.constexpr
    K_WORDS: gl.constexpr
    V_WORDS: gl.constexpr
    K_STORED: gl.constexpr
    V_STORED: gl.constexpr
    NEAREST: gl.constexpr
    ROTATED: gl.constexpr
    QUERIES_IN_REGISTERS: gl.constexpr
    PER_CHANNEL: gl.constexpr
    K_SCALED: gl.constexpr
    SINK: gl.constexpr
    ACCUMULATE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, R, G, KV_HEADS, S, D, HEAD_DIM, OVERHEAD, CHUNK, MASK, SOFTCAP, CODES, STRIDES, SLOTS, ACCUMULATE
    ):
        # What is in a tuple comes as a constexpr, of None too.
        CODES, STRIDES, SLOTS = ([getattr(x, "value", x) for x in one] for one in (CODES, STRIDES, SLOTS))
        self.R, self.G, self.KV_HEADS, self.S = (gl.constexpr(x) for x in (R, G, KV_HEADS, S))
        self.D, self.HEAD_DIM = gl.constexpr(D), gl.constexpr(HEAD_DIM)
        self.OVERHEAD, self.CHUNK, self.MASK = gl.constexpr(OVERHEAD), gl.constexpr(CHUNK), gl.constexpr(MASK)
        self.SOFTCAP, self.BLOCK_Q, self.KEYS = gl.constexpr(SOFTCAP), gl.constexpr(R // G), KEYS
        self.K_CODES, self.V_CODES = (gl.constexpr(x) for x in CODES)
        self.K_STRIDES, self.V_STRIDES = (gl.constexpr(x) for x in STRIDES)
        self.K_SLOT, self.V_SLOT = (gl.constexpr(x) for x in SLOTS)
        self.LOGITS, self.OUTPUT = (
            gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])) for n in (KEYS.value, D)
        )
        self.MINE = gl.constexpr(gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0]))
        self.K_WORDS, self.V_WORDS = (gl.constexpr(D // codes_of_word(codes)) for codes in CODES)
        self.K_STORED, self.V_STORED = (gl.constexpr(HEAD_DIM // codes_of_word(codes)) for codes in CODES)
        self.SINK, self.ACCUMULATE = gl.constexpr(sink_exponent(STRIDES[1])), gl.constexpr(ACCUMULATE)
        self.NEAREST = gl.constexpr(may_be_nan(CODES[0]) or may_be_nan(CODES[1]))
        self.ROTATED = gl.constexpr(is_turboquant(CODES[0]))
        # Of heads of 64 they are as many registers as weights: ptxas (12.8) gives weights the same ones, so that from
        # the second tile on queries are the weights of the tile before.
        self.QUERIES_IN_REGISTERS = gl.constexpr(D > 64)
        self.PER_CHANNEL = gl.constexpr(CODES[0] == "int4_per_channel")
        self.K_SCALED = gl.constexpr(STRIDES[0] is not None and CODES[0] != "int4_per_channel")


@aggregate
class Rooms:
    """Shared memory: queries, of rotated ones what float16 rounds off them; a tile's keys and values; of its keys,
    [KEYS], their `scales`, `logs`, the log2 of what values are yet to be multiplied by (-inf of unseen keys), and
    `inverses` of that, which a warp may still read while others are at the next tile, by stage; and two tiles of codes,
    with what they have beside them, () where that is nothing."""

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    logs: gl.shared_memory_descriptor
    inverses: gl.shared_memory_descriptor
    k_codes: gl.shared_memory_descriptor
    v_codes: gl.shared_memory_descriptor
    of_keys: gl.tuple
    of_values: gl.tuple

    @gluon.constexpr_function
    def __init__(self, q, q_rest, tile, of_tile, k_codes, v_codes, of_keys, of_values):
        self.q, self.q_rest, self.tile = q, q_rest, tile
        self.scales, self.logs, self.inverses = of_tile
        self.k_codes, self.v_codes, self.of_keys, self.of_values = k_codes, v_codes, of_keys, of_values

    @gluon.jit
    def keys(self):
        return self.tile.index(0)

    @gluon.jit
    def values(self):
        return self.tile.index(1)

    @gluon.jit
    def exchange(self, shape):
        """The place of a tile, for outputs [R, D]."""
        return reinterpret(self.tile, gl.float32, [shape.R, shape.D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.constexpr_function
def _code_memory(words, codes):
    """Layout of rows of `words` words. Eight threads read the same four columns of eight rows, which lie in different
    banks. Words that are spread are read in slices."""
    if is_spread(codes):
        return PLAIN.value
    phase = 32 // words
    return gl.SwizzledSharedLayout(4, phase, 8 // phase, [2, 1, 0])


@gluon.jit
def make_rooms(shape):
    OF_KEYS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    REST: gl.constexpr = shape.R if shape.ROTATED else 8  # of other queries there is nothing to be kept
    of_keys = ()
    of_values = ()
    if shape.PER_CHANNEL:
        of_keys = (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, 1, shape.D], PLAIN),)
    elif shape.K_SCALED:
        of_keys = (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, KEYS_OF_WARP], FLAT),)
    if shape.V_STRIDES is not None:
        of_values = (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, KEYS_OF_WARP], FLAT),)
    of_tile = (
        gl.allocate_shared_memory(gl.float32, [KEYS], OF_KEYS),
        gl.allocate_shared_memory(gl.float32, [KEYS], OF_KEYS),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], OF_KEYS),
    )
    K_ROW: gl.constexpr = memory_words(shape.K_WORDS, shape.K_CODES)
    V_ROW: gl.constexpr = memory_words(shape.V_WORDS, shape.V_CODES)
    K_CODES: gl.constexpr = [STAGES, WARPS, KEYS_OF_WARP, K_ROW]
    V_CODES: gl.constexpr = [STAGES, WARPS, KEYS_OF_WARP, V_ROW]
    return Rooms(
        gl.allocate_shared_memory(gl.float16, [shape.R, shape.D], tile_layout([shape.R, shape.D])),
        gl.allocate_shared_memory(gl.float16, [REST, shape.D], tile_layout([REST, shape.D])),
        gl.allocate_shared_memory(gl.float16, [2, KEYS, shape.D], tile_layout([KEYS, shape.D])),
        of_tile,
        gl.allocate_shared_memory(gl.int32, K_CODES, _code_memory(K_ROW, shape.K_CODES)),
        gl.allocate_shared_memory(gl.int32, V_CODES, _code_memory(V_ROW, shape.V_CODES)),
        of_keys,
        of_values,
    )


@gluon.jit
def keys_of(item, at, stop, shape):
    """The first key and the end of an item's tiles at..stop; none where a sequence is longer than its table and has its
    window outside."""
    begin, past = item.key_range(at, stop)
    if not sees_first_keys(shape.MASK):
        past = gl.where(item.low < past, past, begin)
    return begin, past
