"""Gluon: what the Hopper kernel for latent rows of codes is compiled for, and its shared memory."""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_even_split import window_mask
from ..gluon_names import reinterpret
from .hopper_fp8_operands import KEYS, WARPS
from .hopper_items import LATENT, ROPE

STAGES = gl.constexpr(2)  # of tiles
LOAD = gl.constexpr(64)  # keys that are loaded and released together, half a tile
GROUPS = gl.constexpr(4)  # scales of a row of `fp8_ds_mla`


@aggregate
class CodeShape:
    """As `hopper_items.Shape`, of products that are transposed always: logits and weights [KEYS, ROWS], outputs
    [LATENT, ROWS], both in the layout MMA. GROUPED: rows of `fp8_ds_mla`, else of e4m3 alone; ROPE_BYTES of a
    rotated part."""

    ROWS: gl.constexpr
    G: gl.constexpr
    HEADS: gl.constexpr
    PARTS: gl.constexpr
    PAGE: gl.constexpr
    COPY: gl.constexpr
    OVERHEAD: gl.constexpr
    CHUNK: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    MASK: gl.constexpr
    SOFTCAP: gl.constexpr
    DTYPE: gl.constexpr
    GROUPED: gl.constexpr
    ROPE_BYTES: gl.constexpr
    BLOCK_Q: gl.constexpr
    KEYS: gl.constexpr
    MMA: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE, GROUPED):
        self.ROWS, self.G, self.HEADS = gl.constexpr(ROWS), gl.constexpr(G), gl.constexpr(HEADS)
        self.PARTS = gl.constexpr(PARTS)
        self.PAGE, self.COPY = gl.constexpr(PAGE), gl.constexpr(min(PAGE, LOAD.value))
        self.OVERHEAD, self.CHUNK = gl.constexpr(OVERHEAD), gl.constexpr(CHUNK)
        self.MASK = gl.constexpr(window_mask(WINDOW))
        self.CAUSAL, self.WINDOW, self.SOFTCAP = gl.constexpr(CAUSAL), gl.constexpr(WINDOW), gl.constexpr(SOFTCAP)
        self.DTYPE, self.GROUPED = gl.constexpr(DTYPE), gl.constexpr(GROUPED)
        self.ROPE_BYTES = gl.constexpr(ROPE.value * (2 if GROUPED else 1))
        self.BLOCK_Q, self.KEYS = gl.constexpr(ROWS // G), KEYS
        mma = gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, ROWS, 16])
        self.MMA, self.ROW = gl.constexpr(mma), gl.constexpr(gl.SliceLayout(0, mma))


@aggregate
class CodeRooms:
    """Shared memory: the parts of tiles as bytes, queries, weights [KEYS, ROWS] and a factor of each row; of tiles
    with scales by groups those, and what values are multiplied with, [GROUPS, KEYS] float16.

    full: of tiles; empty: of halves of tiles, LOAD keys each.
    """

    codes: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    q_latent: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    ratios: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, rope, scales, q_latent, q_rope, weights, ratios, factors, full, empty):
        self.codes, self.rope, self.scales = codes, rope, scales
        self.q_latent, self.q_rope = q_latent, q_rope
        self.weights, self.ratios, self.factors = weights, ratios, factors
        self.full, self.empty = full, empty

    @gluon.jit
    def wait_full(self, c):
        mbarrier.wait(self.full.index(c % STAGES), (c // STAGES) & 1)

    @gluon.jit
    def wait_empty(self, c, half: gl.constexpr):
        mbarrier.wait(self.empty.index(c % STAGES * 2 + half), ((c // STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, c, half: gl.constexpr):
        mbarrier.arrive(self.empty.index(c % STAGES * 2 + half), count=1)

    @gluon.jit
    def words(self, c):
        """A tile's latent codes as words [KEYS, LATENT / 4]."""
        WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        return reinterpret(self.codes.index(c % STAGES), gl.int32, [KEYS, LATENT // 4], WORDS)

    @gluon.jit
    def rope_words(self, c):
        """A tile's rotated codes as words [KEYS, ROPE / 4]."""
        WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
        return reinterpret(self.rope.index(c % STAGES), gl.int32, [KEYS, ROPE // 4], WORDS)

    @gluon.jit
    def rope_rows(self, c):
        """A tile's rotated elements [KEYS, ROPE] of bfloat16."""
        ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return reinterpret(self.rope.index(c % STAGES), gl.bfloat16, [KEYS, ROPE], ROWS)

    @gluon.jit
    def scale_rows(self, c):
        """A tile's scales [KEYS, GROUPS]."""
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        return reinterpret(self.scales.index(c % STAGES), gl.float32, [KEYS, GROUPS], PLAIN)
