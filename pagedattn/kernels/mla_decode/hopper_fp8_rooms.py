"""Gluon: what the Hopper kernel for latent rows of codes is compiled for, and its shared memory."""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_even_split import window_mask
from ..gluon_names import reinterpret
from .hopper_fp8_operands import WARPS
from .hopper_items import KEYS, LATENT, ROPE

STAGES = gl.constexpr(4)  # of tiles
GROUPS = gl.constexpr(4)  # scales of a row of `fp8_ds_mla`


@gluon.constexpr_function
def byte_layout(shape):
    """Of bytes [.., n] in shared memory: rows of less than 32 lie one after the other."""
    return gl.NVMMASharedLayout(min(128, shape[-1]) if shape[-1] >= 32 else 0, element_bitwidth=8, rank=len(shape))


@gluon.constexpr_function
def _tile_of_bytes(shape):
    """Layout of memory [.., rows, n] whose tiles are the last two dimensions."""
    return byte_layout(shape[-2:])


@gluon.jit
def _as_codes(memory, SHAPE: gl.constexpr):
    """Shared memory as codes of e4m3."""
    LAYOUT: gl.constexpr = _tile_of_bytes(SHAPE)
    return reinterpret(memory, gl.float8e4nv, SHAPE, LAYOUT)


@aggregate
class CodeShape:
    """As `hopper_items.Shape`, of products that are transposed always: logits and weights [KEYS, ROWS], outputs
    two times [HALF, ROWS], both in the layout MMA. GROUPED: rows of `fp8_ds_mla`, else of e4m3 alone; ROPE_BYTES of a
    rotated part. WAITS: programs wait for states of others. CODE_PRODUCTS: keys are multiplied as codes, by queries
    that are the sum of two e4m3, else as float16; CODE_MMA: MMA of products of codes."""

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
    CODE_PRODUCTS: gl.constexpr
    ROPE_BYTES: gl.constexpr
    WAITS: gl.constexpr
    BLOCK_Q: gl.constexpr
    KEYS: gl.constexpr
    MMA: gl.constexpr
    CODE_MMA: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, G, HEADS, PARTS, PAGE, OVERHEAD, CHUNK, CAUSAL, WINDOW, SOFTCAP, DTYPE, GROUPED, WAITS):
        self.ROWS, self.G, self.HEADS = gl.constexpr(ROWS), gl.constexpr(G), gl.constexpr(HEADS)
        self.PARTS = gl.constexpr(PARTS)
        self.PAGE, self.COPY = gl.constexpr(PAGE), gl.constexpr(min(PAGE, KEYS.value))
        self.OVERHEAD, self.CHUNK = gl.constexpr(OVERHEAD), gl.constexpr(CHUNK)
        self.MASK = gl.constexpr(window_mask(WINDOW))
        self.CAUSAL, self.WINDOW, self.SOFTCAP = gl.constexpr(CAUSAL), gl.constexpr(WINDOW), gl.constexpr(SOFTCAP)
        self.DTYPE, self.GROUPED, self.WAITS = gl.constexpr(DTYPE), gl.constexpr(GROUPED), gl.constexpr(WAITS)
        self.CODE_PRODUCTS = gl.constexpr(DTYPE == gl.bfloat16 and ROWS > 16)
        self.ROPE_BYTES = gl.constexpr(ROPE.value * (2 if GROUPED else 1))
        self.BLOCK_Q, self.KEYS = gl.constexpr(ROWS // G), KEYS
        mma = gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, ROWS, 16])
        self.CODE_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, ROWS, 32]))
        self.MMA, self.ROW = gl.constexpr(mma), gl.constexpr(gl.SliceLayout(0, mma))


@aggregate
class CodeRooms:
    """Shared memory: the parts of tiles as bytes, queries, and a factor of each row. Of each warpgroup weights
    [KEYS, ROWS], what those of a row are multiples of, and their sum, as bits how much each warp's largest logit is
    above the former, and of tiles with scales by groups what values are multiplied with, [GROUPS, KEYS] float16.

    full, empty: of tiles, which the warpgroups take by turns; met: both have come so far.
    """

    codes: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    q_latent: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    ratios: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    excess: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, rope, scales, q_latent, q_rope, weights, ratios, factors, sums, excess, full, empty, met):
        self.codes, self.rope, self.scales = codes, rope, scales
        self.q_latent, self.q_rope = q_latent, q_rope
        self.weights, self.ratios, self.factors = weights, ratios, factors
        self.sums, self.excess = sums, excess
        self.full, self.empty, self.met = full, empty, met

    @gluon.jit
    def wait_full(self, c):
        mbarrier.wait(self.full.index(c % STAGES), (c // STAGES) & 1)

    @gluon.jit
    def wait_empty(self, c):
        mbarrier.wait(self.empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, c):
        mbarrier.arrive(self.empty.index(c % STAGES), count=1)

    @gluon.jit
    def meet(self, n):
        """Wait until both warpgroups have come here for the n-th time; how often that was."""
        mbarrier.arrive(self.met, count=1)
        mbarrier.wait(self.met, n & 1)
        return n + 1

    @gluon.jit
    def passed(self, ROWS: gl.constexpr):
        """Where sums of outputs pass between the warpgroups once all logits are there, in place of queries: of each
        [ROWS / 4, 512] float32."""
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        return reinterpret(self.q_latent.index(0), gl.float32, [2, ROWS // 4, 512], PLAIN)

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
    def key_codes(self, c):
        """A tile's latent codes [KEYS, LATENT]."""
        return _as_codes(self.codes.index(c % STAGES), [KEYS, LATENT])

    @gluon.jit
    def rope_codes(self, c):
        """A tile's rotated codes [KEYS, ROPE]."""
        return _as_codes(self.rope.index(c % STAGES), [KEYS, ROPE])

    @gluon.jit
    def query_codes(self, zero, ROWS: gl.constexpr):
        """The latent part of queries as two e4m3, [2, ROWS, LATENT], the smaller first."""
        return _as_codes(self.q_latent.index(zero), [2, ROWS, LATENT])

    @gluon.jit
    def query_rope_codes(self, ROWS: gl.constexpr):
        """The rotated part of queries as two e4m3, [2, ROWS, ROPE]."""
        return _as_codes(self.q_rope, [2, ROWS, ROPE])

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
