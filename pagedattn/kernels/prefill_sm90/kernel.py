"""Gluon: prefill over a paged cache on Hopper, warp-specialised: four warps load by TMA, two warpgroups compute.

Legend: a work item is some query tokens x PACK query heads of one KV head (`tile_rows`), as 2 x 64 rows; a warpgroup
("consumer") owns 64 of them. Tiles of BLOCK_N keys are visited from the last to the first, so that the masked ones
come first. The tile schedule of a step is filled once by `tile_scheduler`, and a counter hands its items out to as many
programs as there are SMs. Where that leaves SMs idle, `split_kv_scheduler` splits the items' keys; what `split_kv`
leaves of them is for `reduce_splits` to add up.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.target import target_of
from ...spec import Mask
from ..gluon_device import LOG2E, tile_layout
from ..inputs import VARYING, AttentionInputs, outputs_kept
from .consumer import Output, consume
from .pipeline import Channels, make_ring
from .plan import FIELDS, by_eights, copied_queries, head_parts, heads_together, in_blocks, keys_per_tile, value_width
from .producer import produce_items, produce_tiles, produce_values
from .work_item import CONSUMERS, LOADERS, ROWS, Items, Shape, query_room

_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_QUERY = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


# As a constant, an argument that is 1 would not fit an aggregate, and every table's width would compile a kernel.
@gluon.jit(do_not_specialize=["heads", "max_keys", "sl_t", "s_table"], do_not_specialize_on_alignment=["table"])
def _prefill_kernel(
    query, key, value, table, out, lse_out, entries, workspace, sinks, heads, max_keys, scale, softcap, s_table, k_rows,
    k_head_rows, k_head_columns, v_rows, v_head_rows, v_head_columns, so_t, so_h, sl_t, BLOCK_N: gl.constexpr, D:
    gl.constexpr, PACK: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, FIELDS: gl.constexpr, Q_STAGES:
    gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = key.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    INDEX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape = Shape(BLOCK_N, D, PACK, GROUP, PAGE, FIELDS, CAUSAL, WINDOW, SOFTCAP, DTYPE, LOADERS)
    tail = gl.allocate_shared_memory(gl.int64, [LOADERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LOADERS):
        mbarrier.init(tail.index(i), count=1)
    channels = Channels(
        make_ring(gl.int32, [FIELDS], INDEX, 2, CONSUMERS + 2 * LOADERS - 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(DTYPE, query_room(PACK, D), QUERY, Q_STAGES, 1),
        make_ring(DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS, LOADERS),
        make_ring(DTYPE, [BLOCK_N, D], TILE, STAGES, CONSUMERS, LOADERS),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    fence_async_shared()
    items = Items(entries, heads, max_keys, TOGETHER)
    output = Output(out, so_t, so_h, sl_t)
    of_keys, of_values = (None, 0), (None, 0, 1.0)
    k_place = (k_rows, k_head_rows, k_head_columns)
    v_place = (v_rows, v_head_rows, v_head_columns)
    gl.warp_specialize(
        [
            (consume, (0, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape)),
            (consume, (1, scale, softcap, sinks, of_keys, of_values, output, lse_out, workspace, channels, shape)),
            (produce_items, ((query,), (key,), table, s_table, k_place, channels.k, items, channels, shape)),
            (produce_tiles, (1, (key,), table, s_table, k_place, channels.k, channels, shape)),
            (produce_values, (0, (value,), table, s_table, v_place, tail, channels, shape)),
            (produce_values, (1, (value,), table, s_table, v_place, tail, channels, shape)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


def constants_of(
    dim: int,
    group: int,
    page: int,
    *,
    pack: int,
    mask: Mask,
    softcap: bool,
    fields: int = FIELDS,
    dim_v: int = 0,
    kv_heads: int = 1,
) -> dict[str, Any]:
    """What the kernel is compiled for; see `Shape`. Shared memory has room for two query tiles up to D 128."""
    first, _ = head_parts(dim)
    return {
        "BLOCK_N": keys_per_tile(dim, dim_v),
        "D": first,
        "PACK": pack,
        "GROUP": group,
        "PAGE": page,
        "FIELDS": fields,
        "Q_STAGES": 2 if dim <= 128 else 1,
        "STAGES": 2,
        "CAUSAL": bool(mask.causal),
        "WINDOW": mask.sliding_window or 0,
        "SOFTCAP": softcap,
        "TOGETHER": heads_together(kv_heads) * -(-group // pack),
    }


# Queries, keys and values are tensor descriptors; `scale` is the layer's, in which there is none of a cache.
_launch = Launcher(_prefill_kernel, VARYING)


def launch(
    inputs: AttentionInputs,
    entries: torch.Tensor,
    pack: int,
    workspace: torch.Tensor | None = None,
    key_starts: torch.Tensor | None = None,
) -> None:
    """One launch over a schedule of tiles of `pack` query heads. workspace: for the partials of splits, which
    `reduce_splits` is to add up. key_starts: of packed keys, in place of a block table, the first of each sequence,
    int32 [B, 1]."""
    query, key, value, out, lse = (inputs.query, in_blocks(inputs.key), in_blocks(inputs.value), inputs.out, inputs.lse)
    constants, heads, programs = launch_grid(inputs, entries, pack)
    table, part = rows_of(inputs, key_starts), copied_slots(constants)
    (keys, k_place), (values, v_place) = cache_rows(key, part), cache_rows(value, part)
    arguments = (
        *(query_rows(query, pack), keys, values, table, out, lse, entries, workspace, inputs.sinks),
        *(heads, table.shape[1] * key.shape[1]),
        *(inputs.scale * LOG2E.value, inputs.softcap, table.stride(0)),
        *(*k_place, *v_place, *out.stride()[:2], 0 if lse is None else lse.stride(0)),
    )
    with on_device(query):
        _launch((programs,), arguments, constants, outputs_kept(inputs), num_warps=4, launch_pdl=True)


def launch_grid(inputs: AttentionInputs, entries: torch.Tensor, pack: int) -> tuple[dict[str, Any], int, int]:
    """Constants of a launch over a tile schedule, packs of query heads, and programs."""
    query, key = inputs.query, in_blocks(inputs.key)
    page = 0 if inputs.block_table is None else key.shape[1]
    group = query.shape[1] // key.shape[2]
    flags = {"pack": pack, "softcap": inputs.softcap > 0, "fields": entries.shape[1]}
    flags |= {"dim_v": value_width(inputs), "kv_heads": key.shape[2]}
    dim = max(key.shape[3], query.shape[2])  # as of values
    constants = constants_of(dim, group, page, mask=Mask.of(inputs.mask), **flags)
    heads = key.shape[2] * -(-group // pack)
    return constants, heads, min(target_of(query.device).num_sms, (len(entries) - 2) * heads)


def rows_of(inputs: AttentionInputs, key_starts: torch.Tensor | None) -> torch.Tensor:
    """The block table, or where each sequence's packed keys begin."""
    table = inputs.block_table if key_starts is None else key_starts
    if table is None:
        raise ValueError("packed keys need key_starts")
    return table


def copied_slots(constants: dict[str, Any]) -> int:
    """Slots that one copy of keys or values brings."""
    most = constants["BLOCK_N"] // LOADERS.value
    return min(constants["PAGE"], most) or most


def query_rows(query: torch.Tensor, pack: int, width: int = 0) -> TensorDescriptor:
    """Queries [T, Hq, D] for copies of 64 rows, of `pack` heads each and `width` elements, 0 is all, or, as
    [Hq, T, D], of eight rows (`tile_rows`)."""
    block = [*copied_queries(pack), width or query.shape[2]]
    if by_eights(pack):
        query = query.transpose(0, 1)
    layout = tile_layout(block) if width else _QUERY
    return TensorDescriptor(query, list(query.shape), list(query.stride()), block, layout)


def cache_rows(
    cache: torch.Tensor, part: int, layout: gl.NVMMASharedLayout = _TILE
) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """A cache [P, S, H, D] as a matrix of rows, and where block b, head h, slot s is in it: row b * x + h * y + s,
    column h * z."""
    blocks, size, heads, dim = cache.shape
    per_block, per_slot, per_head, _ = cache.stride()
    by_rows = per_head >= per_slot or heads == 1
    place = (per_block // per_slot, per_head // per_slot if by_rows else 0, 0 if by_rows else per_head)
    rows = (blocks - 1) * place[0] + (heads - 1) * place[1] + size
    columns = dim if by_rows else (heads - 1) * per_head + dim
    return TensorDescriptor(cache, [rows, columns], [per_slot, 1], [part, dim], layout), place


def block_constants(mask: Mask) -> dict[str, int]:
    """Constants of kernels whose rows may see earlier blocks alone."""
    size = mask.earlier_blocks or 0
    return {"EARLIER": size, "RECENT": mask.recent_blocks or 0, "FIRST": (mask.from_block or 0) * size}
