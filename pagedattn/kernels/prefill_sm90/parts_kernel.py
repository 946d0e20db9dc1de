"""Gluon: prefill on Hopper of heads that are no power of two, in two parts that are: the warps of `kernel`."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LOG2E, tile_layout
from ..inputs import VARYING, AttentionInputs, outputs_kept
from .consumer import Output, consume
from .kernel import copied_slots, launch_grid, query_rows, rows_of
from .pipeline import Channels, make_ring
from .plan import head_parts, in_blocks
from .producer import produce_items, produce_tiles, produce_values
from .work_item import CONSUMERS, LOADERS, ROWS, Items, Shape, query_room


# As a constant, an argument that is 1 would not fit an aggregate, and every table's width would compile a kernel.
@gluon.jit(do_not_specialize=["heads", "max_keys", "sl_t", "s_table"], do_not_specialize_on_alignment=["table"])
def _prefill_kernel(
    query, more_query, key, more_key, value, more_value, table, out, lse_out, entries, workspace, sinks, heads,
    max_keys, scale, softcap, s_table, so_t, so_h, sl_t, BLOCK_N: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr,
    GROUP: gl.constexpr, PAGE: gl.constexpr, FIELDS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MORE: gl.constexpr, MORE_V: gl.constexpr,
    DIM_V: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = key.dtype
    QUERY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    INDEX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = [BLOCK_N, 1, 1, D]
    OF_VALUE: gl.constexpr = None if MORE_V == 0 else [BLOCK_N, 1, 1, MORE_V]
    shape = Shape(
        BLOCK_N, D, PACK, GROUP, PAGE, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, LOADERS, None, False, MORE, MORE_V, DIM_V
    )
    tail = gl.allocate_shared_memory(gl.int64, [LOADERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LOADERS):
        mbarrier.init(tail.index(i), count=1)
    channels = Channels(
        make_ring(gl.int32, [FIELDS], INDEX, 2, CONSUMERS + 2 * LOADERS - 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1, 1, query_room(PACK, MORE)),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1, 1, query_room(PACK, MORE)),
        make_ring(DTYPE, TILE, tile_layout(TILE), STAGES, CONSUMERS, LOADERS, [BLOCK_N, 1, 1, MORE]),
        make_ring(DTYPE, TILE, tile_layout(TILE), STAGES, CONSUMERS, LOADERS, OF_VALUE),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    fence_async_shared()
    items = Items(entries, heads, max_keys, TOGETHER)
    output = Output(out, so_t, so_h, sl_t)
    of_keys, of_values = (None, 0), (None, 0, 1.0)
    queries, keys, values = (query, more_query), (key, more_key), (value,)
    if MORE_V > 0:
        values = (value, more_value)
    gl.warp_specialize(
        [
            (consume, (0, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape)),
            (consume, (1, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape)),
            (produce_items, (queries, keys, table, s_table, None, channels.k, items, channels, shape)),
            (produce_tiles, (1, keys, table, s_table, None, channels.k, channels, shape)),
            (produce_values, (0, values, table, s_table, None, tail, channels, shape)),
            (produce_values, (1, values, table, s_table, None, tail, channels, shape)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


_launch = Launcher(_prefill_kernel, VARYING)


def launch(
    inputs: AttentionInputs,
    entries: torch.Tensor,
    pack: int,
    workspace: torch.Tensor | None = None,
    key_starts: torch.Tensor | None = None,
) -> None:
    """As of `kernel.launch`."""
    query, key, value, out, lse = (inputs.query, in_blocks(inputs.key), in_blocks(inputs.value), inputs.out, inputs.lse)
    constants, heads, programs = launch_grid(inputs, entries, pack)
    (first, more), (_, more_v) = head_parts(query.shape[2]), head_parts(out.shape[2])
    constants |= {"MORE": more, "MORE_V": more_v, "DIM_V": out.shape[2]}
    table, part = rows_of(inputs, key_starts), copied_slots(constants)
    arguments = (
        *(query_rows(query, pack, first), query_rows(query, pack, more)),
        *(_block_rows(key, part, first), _block_rows(key, part, more), _block_rows(value, part, first)),
        *(_block_rows(value, part, more_v) if more_v else None, table, out, lse, entries, workspace, inputs.sinks),
        *(heads, table.shape[1] * key.shape[1], inputs.scale * LOG2E.value, inputs.softcap, table.stride(0)),
        *(*out.stride()[:2], 0 if lse is None else lse.stride(0)),
    )
    with on_device(query):
        _launch((programs,), arguments, constants, outputs_kept(inputs), num_warps=4, launch_pdl=True)


def _block_rows(cache: torch.Tensor, part: int, width: int) -> TensorDescriptor:
    """A cache [P, S, H, D] as [S, P, H, D], for copies of `width` elements of `part` slots; past a head's last element
    0 is read."""
    shape, strides = ([of[at] for at in (1, 0, 2, 3)] for of in (cache.shape, cache.stride()))
    block = [part, 1, 1, width]
    return TensorDescriptor(cache, shape, strides, block, tile_layout(block))
