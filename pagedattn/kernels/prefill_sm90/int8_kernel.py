"""Gluon: prefill on Hopper over a paged int8 cache: the warps of `kernel`, but for those that bring keys and values."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LOG2E
from ..inputs import VARYING, AttentionInputs
from .consumer import Output, consume
from .int8_codes import ScalePlane, convert_codes, produce_scales
from .kernel import cache_rows, launch_grid, query_rows
from .pipeline import Channels, make_ring
from .producer import produce_items
from .work_item import CONSUMERS, ROWS, Items, Shape, code_layout


# As a constant, an argument that is 1 would not fit an aggregate, and every table's width would compile a kernel.
@gluon.jit(
    do_not_specialize=[
        *("heads", "max_keys", "sl_t", "s_table", "k_per_block", "k_per_slot", "k_per_head"),
        *("v_per_block", "v_per_slot", "v_per_head"),
    ],
    do_not_specialize_on_alignment=["table"],
)
def _prefill_kernel(
    query, key, value, k_scale_cache, v_scale_cache, table, out, lse_out, entries, workspace, sinks, heads, max_keys,
    scale, softcap, s_table, k_rows, k_head_rows, k_head_columns, v_rows, v_head_rows, v_head_columns, k_per_block,
    k_per_slot, k_per_head, v_per_block, v_per_slot, v_per_head, so_t, so_h, sl_t, BLOCK_N: gl.constexpr, D:
    gl.constexpr, PACK: gl.constexpr, PACKS: gl.constexpr, PAGE: gl.constexpr, FIELDS: gl.constexpr, Q_STAGES:
    gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PINS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shape = Shape(BLOCK_N, D, PACK, PACKS, PAGE, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, 1, "int8")
    channels = Channels(
        make_ring(gl.int32, [FIELDS], FLAT, 2, CONSUMERS + 2),
        make_ring(DTYPE, [ROWS // PACK, PACK, D], QUERY, Q_STAGES, 1),
        make_ring(DTYPE, [ROWS // PACK, PACK, D], QUERY, Q_STAGES, 1),
        make_ring(DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS, 2),
        make_ring(DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, 4], PINS),  # of a quarter of the size: nothing else is left
    )
    staging = make_ring(gl.uint8, [BLOCK_N, D], shape.CODE_LAYOUT, 2, 1)
    key_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], FLAT)
    value_scales = make_ring(gl.float32, [BLOCK_N], FLAT, 1, 1)
    fence_async_shared()
    items = Items(entries, heads, max_keys, TOGETHER)
    output = Output(out, so_t, so_h, sl_t)
    of_keys = ScalePlane(k_scale_cache, k_per_block, k_per_slot, k_per_head)
    of_values = ScalePlane(v_scale_cache, v_per_block, v_per_slot, v_per_head)
    places = ((k_rows, k_head_rows, k_head_columns), (v_rows, v_head_rows, v_head_columns))
    for_keys, for_values = (key_scales, 0), (None, 0, 1.0)
    gl.warp_specialize(
        [
            (
                consume,
                (0, scale, softcap, sinks, for_keys, for_values, output, lse_out, workspace, channels, shape),
            ),
            (
                consume,
                (1, scale, softcap, sinks, for_keys, for_values, output, lse_out, workspace, channels, shape),
            ),
            (convert_codes, (staging, value_scales, channels, shape)),
            (produce_items, ((query,), (key, value), table, s_table, places, staging, items, channels, shape)),
            (produce_scales, (of_keys, of_values, table, s_table, key_scales, value_scales, channels, shape)),
        ],
        [4, 4, 1, 1],
        [224, 40, 24, 24],
    )


_launch = Launcher(_prefill_kernel, VARYING)


def launch(inputs: AttentionInputs, entries: torch.Tensor, workspace: torch.Tensor | None = None) -> None:
    """As of `kernel.launch`."""
    query, key, value, table, out, lse = (*inputs[:4], inputs.out, inputs.lse)
    k_scales, v_scales = inputs.k_scale_cache, inputs.v_scale_cache
    if table is None or k_scales is None or v_scales is None:
        raise ValueError("packed keys have no blocks and no scales")
    constants, heads, programs = launch_grid(inputs, entries)
    layout = code_layout(query.shape[2])
    size = key.shape[1]
    part = min(size, constants["BLOCK_N"])
    keys, k_place = cache_rows(key.view(torch.uint8), part, layout)
    values, v_place = cache_rows(value.view(torch.uint8), part, layout)
    arguments = (
        *(query_rows(query, constants["PACK"]), keys, values, k_scales, v_scales, table, out, lse, entries),
        *(workspace, inputs.sinks, heads, table.shape[1] * size, inputs.scale * LOG2E.value, inputs.softcap),
        *(table.stride(0), *k_place, *v_place, *k_scales.stride()[:3], *v_scales.stride()[:3]),
        *(*out.stride()[:2], 0 if lse is None else lse.stride(0)),
    )
    with on_device(query):
        _launch((programs,), arguments, constants, num_warps=4, launch_pdl=True)
