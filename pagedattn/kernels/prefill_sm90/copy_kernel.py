"""Gluon: prefill on Hopper over a copy of a quantised cache (`../dequantise`), whose rows are read as packed ones are.
Keys whose rows or channels had scales are float16, and of those with scales of rows each tile or each key has a
factor."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...spec import Mask
from ..gluon_device import LOG2E
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from .consumer import Output, consume
from .kernel import block_constants, cache_rows, launch_grid, query_rows
from .pipeline import Channels, make_ring
from .producer import FACTORS, produce_items_early, produce_values
from .query_producer import produce_queries
from .work_item import CONSUMERS, ROWS, Items, Shape, query_room


# As a constant, an argument that is 1 would not fit an aggregate, and every length would compile a kernel.
@gluon.jit(
    do_not_specialize=["heads", "max_keys", "sl_t", "s_seq", "s_head"],
    do_not_specialize_on_alignment=["starts"],
)
def _prefill_kernel(
    query, key, value, starts, out, lse_out, entries, workspace, sinks, factors, k_scale, v_scale, heads, max_keys,
    qk_scale, out_scale, softcap, so_t, so_h, sl_t, s_kscale, s_vscale, s_seq, s_head, BLOCK_N: gl.constexpr,
    D: gl.constexpr, PACK: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, TOGETHER: gl.constexpr,
    EARLIER: gl.constexpr, RECENT: gl.constexpr, FIRST: gl.constexpr, KEY_SCALES: gl.constexpr, DIM_V: gl.constexpr,
):  # fmt: skip
    scale = qk_scale * LOG2E
    DTYPE: gl.constexpr = query.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    INDEX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCALED: gl.constexpr = factors is not None and not KEY_SCALES
    CAST_Q: gl.constexpr = DTYPE != key.dtype
    AHEAD: gl.constexpr = CAST_Q and Q_STAGES > 1  # by warps of their own
    shape = Shape(
        BLOCK_N, D, PACK, GROUP, 0, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, 1, None, SCALED,
        DIM_V=DIM_V, CAST_Q=CAST_Q, EARLIER=EARLIER, RECENT=RECENT, FIRST=FIRST, KEY_SCALES=KEY_SCALES,
    )  # fmt: skip
    tail = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(tail.index(0), count=1)
    channels = Channels(
        make_ring(gl.int32, [FIELDS], INDEX, 2, 2 * CONSUMERS + 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(key.dtype, [BLOCK_N, D], TILE, STAGES, CONSUMERS, 1 + KEY_SCALES),
        make_ring(DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS, 1),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    of_values = (v_scale, s_vscale, out_scale)
    of_keys, scales, casts = (k_scale, s_kscale), None, None
    if AHEAD:
        casts = (make_ring(gl.float32, [ROWS], INDEX, Q_STAGES, 1), make_ring(gl.float32, [ROWS], INDEX, Q_STAGES, 1))
    fence_async_shared()
    items = Items(entries, heads, max_keys, TOGETHER)
    output = Output(out, so_t, so_h, sl_t)
    if KEY_SCALES:
        rooms = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        of_keys, scales = (rooms, 0), (factors, rooms)
    elif SCALED:
        of_keys = (factors, s_head, s_seq)
    place = (1, 0, D)  # of a head's rows: heads follow each other
    gl.warp_specialize(
        [
            (
                consume,
                (0, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape, casts),
            ),
            (
                consume,
                (1, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape, casts),
            ),
            (produce_items_early, ((key,), starts, 1, place, channels.k, items, channels, shape, scales)),
            (produce_values, (0, (value,), starts, 1, place, tail, channels, shape)),
            (produce_queries, (0, (query,), casts, channels, shape)),
            (produce_queries, (1, (query,), casts, channels, shape)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


# What is copied, in the order of `../dequantise/kernel.py`.
_launch = Launcher(_prefill_kernel, VARYING, ("key", "value", "starts", "factors"))


def launch(inputs: AttentionInputs, entries: torch.Tensor, pack: int, workspace: torch.Tensor | None = None) -> None:
    """As of `kernel.launch`, of a call as `../dequantise` makes it: block_table has the first row of each sequence, and
    k_scale_cache factors of the logits of float16 keys, float32 [B, Hkv, tiles], or [B, Hkv, keys] of whole tiles, or
    is None."""
    query, key, value, starts, out, lse = (*inputs[:4], inputs.out, inputs.lse)
    if starts is None:
        raise ValueError("a copy says where its sequences begin")
    constants, heads, programs = launch_grid(inputs, entries, pack)
    constants |= block_constants(Mask.of(inputs.mask))
    del constants["PAGE"]
    tile, scales = constants["BLOCK_N"], inputs.k_scale_cache
    constants["DIM_V"] = out.shape[2]
    constants["KEY_SCALES"] = scales is not None and scales.shape[2] > -(-key.shape[1] // tile)
    factors = key_factors(scales, tile) if scales is not None and constants["KEY_SCALES"] else scales
    (keys, _), (values, _) = cache_rows(key, tile), cache_rows(value, tile)
    arguments = (
        *(query_rows(query, pack, key.shape[3]), keys, values, starts, out, lse, entries, workspace, inputs.sinks),
        *(factors, inputs.k_scale, inputs.v_scale, heads, key.shape[1], inputs.scale),
        *(inputs.out_scale, inputs.softcap, *out.stride()[:2]),
        0 if lse is None else lse.stride(0),
        *map(scale_stride, (inputs.k_scale, inputs.v_scale)),
        *((0, 0) if scales is None else scales.stride()[:2]),
    )
    with on_device(query):
        _launch((programs,), arguments, constants, outputs_kept(inputs), num_warps=4, launch_pdl=True)


def key_factors(scales: torch.Tensor, keys: int) -> TensorDescriptor:
    """Factors [B, Hkv, n] of keys, for copies of so many."""
    return TensorDescriptor(scales, list(scales.shape), list(scales.stride()), [1, 1, keys], FACTORS.value)
