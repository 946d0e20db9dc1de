"""Gluon: prefill on Hopper over a paged cache of 8 bits, k8v4 or int4: the warps of `kernel`, but for those that bring
what is converted."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...spec import Mask
from ..gluon_device import LOG2E
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from ..shape import INT4
from .code_values import convert_codes, converters
from .consumer import Output, consume
from .kernel import block_constants, cache_rows, launch_grid, query_rows
from .pipeline import Channels, make_ring
from .plan import converts_keys, has_vectors
from .producer import produce_items, produce_tiles
from .scale_planes import ChannelPlane, ScalePlane, make_scale_rooms, produce_scales
from .work_item import CONSUMERS, ROWS, Items, Shape, code_layout, has_four_bits, query_room


@gluon.constexpr_function
def registers_of(convert, has_four_bits):
    """Of a thread of the second consumer, of either loader and of the converters, where keys are converted or not, and
    values have four bits or not; the first consumer has what is left."""
    if not convert:
        return [232, 40, 40, 40]
    return [208, 32, 32, 64] if has_four_bits else [216, 32, 32, 40]


# As a constant, an argument that is 1 would not fit an aggregate, and every table's width would compile a kernel.
@gluon.jit(
    do_not_specialize=[
        *("heads", "max_keys", "sl_t", "s_table", "num_blocks", "k_per_block", "k_per_slot"),
        *("k_per_head", "v_per_block", "v_per_slot", "v_per_head"),
    ],
    do_not_specialize_on_alignment=["table"],
)
def _prefill_kernel(
    query, key, value, table, out, lse_out, entries, workspace, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache,
    heads, max_keys, qk_scale, out_scale, softcap, s_table, k_rows, k_head_rows, k_head_columns, v_rows, v_head_rows,
    v_head_columns, so_t, so_h, sl_t, s_kscale, s_vscale, num_blocks, k_per_block, k_per_slot, k_per_head, v_per_block,
    v_per_slot, v_per_head, BLOCK_N: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, GROUP: gl.constexpr,
    PAGE: gl.constexpr, FIELDS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, TOGETHER: gl.constexpr, CODES: gl.constexpr,
    V_CODES: gl.constexpr, CONVERT_KEYS: gl.constexpr, VECTORS: gl.constexpr, EARLIER: gl.constexpr,
    RECENT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    INDEX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape = Shape(
        BLOCK_N, D, PACK, GROUP, PAGE, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, 1, CODES,
        CONVERT_KEYS=CONVERT_KEYS, V_CODES=V_CODES, EARLIER=EARLIER, RECENT=RECENT, FIRST=FIRST,
    )  # fmt: skip
    FILLS: gl.constexpr = 2 if shape.TOKEN_SCALES else 1
    K_DTYPE: gl.constexpr = gl.float16 if CONVERT_KEYS else key.dtype
    K_TILE: gl.constexpr = TILE if CONVERT_KEYS else shape.CODE_LAYOUT
    # Three tiles of codes where there is room, or one of keys and one of values.
    STAGED: gl.constexpr = STAGES + 1 if CONVERT_KEYS and D <= 128 else STAGES
    channels = Channels(
        make_ring(gl.int32, [FIELDS], INDEX, 2, CONSUMERS + 2),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(K_DTYPE, [BLOCK_N, D], K_TILE, STAGES, CONSUMERS),
        make_ring(shape.V_DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    staging = make_ring(gl.uint8, [BLOCK_N, D], shape.CODE_LAYOUT, STAGED, 1, FILLS)
    keys = staging if CONVERT_KEYS else channels.k
    fence_async_shared()
    items = Items(entries, heads, max_keys, TOGETHER)
    output = Output(out, so_t, so_h, sl_t)
    k_place = (k_rows, k_head_rows, k_head_columns)
    v_place = (v_rows, v_head_rows, v_head_columns)
    logit_scale = qk_scale * LOG2E
    of_keys, of_values, rooms, values = (k_scale, s_kscale), (v_scale, s_vscale, out_scale), None, None
    if shape.TOKEN_SCALES:
        values = ((value,), v_place)
        rooms = make_scale_rooms(STAGED, shape)
        of_keys = (rooms, 0)
        if shape.CHANNEL_SCALES:
            k_plane = ChannelPlane(k_scale_cache, num_blocks, k_per_block, k_per_head)
        else:
            k_plane = ScalePlane(k_scale_cache, num_blocks, k_per_block, k_per_slot, k_per_head, VECTORS)
        v_plane = ScalePlane(v_scale_cache, num_blocks, v_per_block, v_per_slot, v_per_head, VECTORS)
        planes = (k_plane, v_plane)
    gl.warp_specialize(
        [
            (
                consume,
                (0, logit_scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape),
            ),
            (
                consume,
                (1, logit_scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape),
            ),
            (produce_items, ((query,), (key,), table, s_table, k_place, keys, items, channels, shape, values)),
            (produce_scales, (table, s_table, staging, planes, rooms, channels, shape))
            if shape.TOKEN_SCALES
            else (
                produce_tiles,
                (0, (value,), table, s_table, v_place, staging, channels, shape, None, shape.PER_TILE - 1),
            ),
            (convert_codes, (staging, rooms, channels, shape)),
        ],
        [4, 1, 1, converters(shape)],
        registers_of(CONVERT_KEYS, has_four_bits(V_CODES)),
    )


_launch = Launcher(_prefill_kernel, VARYING)


def code_constants(codes: tuple[str | None, str | None], convert: bool, dim: int, vectors: bool) -> dict[str, Any]:
    """What the kernel is compiled for besides what others are, where keys are converted or not: beside those of heads
    of 128 there is room for one tile of queries. vectors: of `scale_planes.ScalePlane`."""
    named = {"CODES": codes[0], "V_CODES": codes[1], "CONVERT_KEYS": convert, "VECTORS": vectors}
    return named | ({"Q_STAGES": 1} if convert and dim > 64 else {})


def launch(inputs: AttentionInputs, entries: torch.Tensor, pack: int, workspace: torch.Tensor | None = None) -> None:
    """As of `kernel.launch`."""
    query, key, value, table, out, lse = (*inputs[:4], inputs.out, inputs.lse)
    if table is None:
        raise ValueError("packed keys have no blocks")
    constants, heads, programs = launch_grid(inputs, entries, pack)
    codes = (inputs.format.key.codes, inputs.format.value.codes)
    convert = converts_keys(codes[0], query.dtype)
    k_scales, v_scales = inputs.k_scale_cache, inputs.v_scale_cache
    channels = codes == INT4
    vectors = has_vectors(None if channels else k_scales, v_scales)
    constants |= code_constants(codes, convert, query.shape[2], vectors) | block_constants(Mask.of(inputs.mask))
    if channels and k_scales is not None:
        k_scales = k_scales.view(torch.int32)
    size = key.shape[1]
    part = min(size, constants["BLOCK_N"])
    keys, k_place = cache_rows(key.view(torch.uint8) if convert else key, part, code_layout(key.shape[3]))
    values, v_place = cache_rows(value.view(torch.uint8), part, code_layout(value.shape[3]))
    arguments = (
        *(query_rows(query, pack), keys, values, table, out, lse, entries, workspace, inputs.sinks),
        *(inputs.k_scale, inputs.v_scale, k_scales, v_scales, heads, table.shape[1] * size),
        *(inputs.scale, inputs.out_scale, inputs.softcap, table.stride(0)),
        *(*k_place, *v_place, *out.stride()[:2], 0 if lse is None else lse.stride(0)),
        *map(scale_stride, (inputs.k_scale, inputs.v_scale)),
        len(key),
        *(step for x in (k_scales, v_scales) for step in ((0, 0, 0) if x is None else x.stride()[:3])),
    )
    with on_device(query):
        _launch((programs,), arguments, constants, outputs_kept(inputs), num_warps=4, launch_pdl=True)
