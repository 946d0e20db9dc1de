"""Gluon: the warps that bring int8 keys and values for prefill on Hopper to 16 bits, from tiles of codes.

Keys become the integers that they are, exactly; their scales go to the computing warps, which multiply columns of
logits. Values are multiplied here, and rounded as probabilities are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_names import reinterpret
from .fp8_values import word_layout
from .work_item import take, tiles_of

CONVERTERS = gl.constexpr(4)
_ROWS = gl.constexpr(8)  # that a warp converts at a time


@aggregate
class ScalePlane:
    """Scales of rows [P, S, Hkv, 1] float32."""

    scales: gl.tensor
    per_block: gl.tensor
    per_slot: gl.tensor
    per_head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scales, per_block, per_slot, per_head):
        self.scales, self.per_block, self.per_slot, self.per_head = scales, per_block, per_slot, per_head

    @gluon.jit
    def load(self, block, slot, head, live):
        """Of slots of blocks, 0 where they are not live: whatever lies there could be NaN."""
        at = block.to(gl.int64) * self.per_block + slot * self.per_slot + head * self.per_head
        return gl.load(self.scales + at, mask=live, other=0.0)


@gluon.jit
def _pairs(words, KIND: gl.constexpr):
    """Words of four codes as two words of two integers, as bfloat16 or float16."""
    if KIND == gl.bfloat16:  # 128 + the lower seven bits, less 128 or, where the eighth is set, 256
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b32 h, a, b, k, m, s; mov.b32 k, 0x43004300; mov.b32 m, 0x007f007f; mov.b32 s, 0x00800080;
            prmt.b32 h, $2, 0, 0x4140; lop3.b32 a, h, m, k, 0xea; lop3.b32 b, h, s, k, 0xea; sub.rn.bf16x2 $0, a, b;
            prmt.b32 h, $2, 0, 0x4342; lop3.b32 a, h, m, k, 0xea; lop3.b32 b, h, s, k, 0xea; sub.rn.bf16x2 $1, a, b;
            }""",
            "=&r,=r,r",
            [words],
            (gl.int32, gl.int32),
            True,
            1,
        )
    else:  # 1024 + (code + 128), less 1152
        low, high = gl.inline_asm_elementwise(
            """{ .reg .b32 x, h, k, o; mov.b32 k, 0x64646464; mov.b32 o, 0x64806480; xor.b32 x, $2, 0x80808080;
            prmt.b32 h, x, k, 0x4140; sub.rn.f16x2 $0, h, o; prmt.b32 h, x, k, 0x4342; sub.rn.f16x2 $1, h, o; }""",
            "=&r,=r,r",
            [words],
            (gl.int32, gl.int32),
            True,
            1,
        )
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.constexpr_function
def _multiplication(kind):
    """Code of `_scaled_pairs`: the second bytes of 47000000h, which are codes + 128, times $3, plus $4."""
    return """{ .reg .b32 x, k; .reg .f32 a, b; mov.b32 k, 0x47000000; xor.b32 x, $2, 0x80808080;
        .reg .b32 p, q; prmt.b32 p, x, k, 0x7404; prmt.b32 q, x, k, 0x7414; mov.b32 a, p; mov.b32 b, q;
        fma.rn.f32 a, a, $3, $4; fma.rn.f32 b, b, $3, $4; cvt.rn.KIND.f32 $0, b, a;
        prmt.b32 p, x, k, 0x7424; prmt.b32 q, x, k, 0x7434; mov.b32 a, p; mov.b32 b, q;
        fma.rn.f32 a, a, $3, $4; fma.rn.f32 b, b, $3, $4; cvt.rn.KIND.f32 $1, b, a; }""".replace(
        "KIND", "bf16x2" if kind == gl.bfloat16 else "f16x2"
    )


@gluon.jit
def _scaled_pairs(words, scale, KIND: gl.constexpr):
    """Words of four codes, times the scale of their row, as two words of two elements."""
    # 32768 + (code + 128) is a float32 with the code in its second byte.
    offset = scale * -32896.0
    low, high = gl.inline_asm_elementwise(
        _multiplication(KIND), "=&r,=r,r,r,r", [words, scale, offset], (gl.int32, gl.int32), True, 1
    )
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def produce_scales(of_keys, of_values, table, s_table, key_scales, value_scales, channels, shape):
    """Brings the scales of every item handed out: those of a tile's keys, [BLOCK_N], to `key_scales` at its stage, and
    those of its values, where a query sees them, to the ring `value_scales`."""
    LANES: gl.constexpr = gl.BlockedLayout([shape.BLOCK_N // 32], [32], [1], [0])
    index = gl.arange(0, shape.BLOCK_N, LANES)
    n = 0
    c = 0
    item = take(channels.items, n, 1, shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        row = table + item.seq.to(gl.int64) * s_table
        head = item.head // shape.PACKS
        for back in range(0, high - low):
            key = (high - 1 - back) * shape.BLOCK_N + index
            live = key < item.keys
            if shape.WINDOW > 0:  # blocks that the window has left may be others'
                live = live & (key > item.first - shape.WINDOW)
            block = gl.load(row + key // shape.PAGE, mask=live, other=0)
            of_key = of_keys.load(block, key % shape.PAGE, head, live)
            of_value = of_values.load(block, key % shape.PAGE, head, live)
            channels.k.wait_empty(c)
            key_scales.index(c % channels.k.STAGES).store(of_key)
            mbarrier.arrive(channels.k.barrier(c), count=1)
            value_scales.wait_empty(c)
            value_scales.tile(c).store(of_value)
            mbarrier.arrive(value_scales.barrier(c), count=1)
            c += 1
        n += 1
        item = take(channels.items, n, 1, shape)


@gluon.jit
def _convert_keys(source, target, shape):
    """Codes [BLOCK_N, D] as integers."""
    WORDS: gl.constexpr = word_layout(shape.D // 4, CONVERTERS)
    ROWS: gl.constexpr = CONVERTERS * _ROWS
    for i in gl.static_range(shape.BLOCK_N // ROWS):
        words = source.slice(i * ROWS, ROWS).load(WORDS)
        target.slice(i * ROWS, ROWS).store(_pairs(words, shape.DTYPE))
    fence_async_shared()


@gluon.jit
def _convert_values(source, target, scales, shape):
    """Codes [BLOCK_N, D], times scales [BLOCK_N], as elements."""
    WORDS: gl.constexpr = word_layout(shape.D // 4, CONVERTERS)
    ROWS: gl.constexpr = CONVERTERS * _ROWS
    for i in gl.static_range(shape.BLOCK_N // ROWS):
        words = source.slice(i * ROWS, ROWS).load(WORDS)
        scale = scales.slice(i * ROWS, ROWS).load(gl.SliceLayout(1, WORDS))
        scale, _ = gl.broadcast(gl.expand_dims(scale, 1), words)
        target.slice(i * ROWS, ROWS).store(_scaled_pairs(words, scale, shape.DTYPE))
    fence_async_shared()


@gluon.jit
def convert_codes(staging, value_scales, channels, shape):
    """Converts the keys and values of every item handed out, by turns."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    CODE_WORDS: gl.constexpr = gl.NVMMASharedLayout(shape.CODE_LAYOUT.swizzle_byte_width, element_bitwidth=32, rank=2)
    n = 0
    c = 0
    item = take(channels.items, n, CONVERTERS, shape)
    while item.live > 0:
        low, _, _, high = tiles_of(item, shape)
        for _ in range(0, high - low):
            staging.wait_full(2 * c)
            channels.k.wait_empty(c)
            codes = reinterpret(staging.tile(2 * c), gl.int32, [shape.BLOCK_N, shape.D // 4], CODE_WORDS)
            keys = reinterpret(channels.k.tile(c), gl.int32, [shape.BLOCK_N, shape.D // 2], PAIRS)
            _convert_keys(codes, keys, shape)
            mbarrier.arrive(channels.k.barrier(c), count=1)
            staging.release(2 * c)
            staging.wait_full(2 * c + 1)
            value_scales.wait_full(c)
            channels.wait_empty_values(c)
            codes = reinterpret(staging.tile(2 * c + 1), gl.int32, [shape.BLOCK_N, shape.D // 4], CODE_WORDS)
            values = reinterpret(channels.v.tile(c), gl.int32, [shape.BLOCK_N, shape.D // 2], PAIRS)
            _convert_values(codes, values, value_scales.tile(c), shape)
            mbarrier.arrive(channels.v.barrier(c), count=1)
            staging.release(2 * c + 1)
            value_scales.release(c)
            c += 1
        n += 1
        item = take(channels.items, n, CONVERTERS, shape)
