"""Gluon: attention of a few new tokens per sequence over a paged cache of codes of 8 or 4 bits, in one launch.

The work is split as by the decode kernel for every cache: a head's tiles of keys, in the order of the sequences, are
cut into equal ranges, one per program; programs that share an item exchange partial states. Within a program each of W
warps has KEYS keys of a tile, and a running maximum, sum and output of its own (`key_loop.py`); warps wait for each
other only where a tile has been copied. Of blocks of more rows a program has one state (`warpgroup_loop.py`). Products
are transposed, keys by query rows and channels by query rows: they are padded to 8 rows of queries, not to 16. Source:
stream-K (PPoPP 2023).

Legend: as in `../decode/kernel.py`. R rows of queries (tokens x heads of a group), `s` [W, KEYS, R], `acc` [W, DV, R].
D and DV are powers of two; what is beyond HEAD_DIM and HEAD_DIM_V elements is zeros, or of no use.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...formats.base import plane_strides
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..gluon_device import LEAST, LOG2E
from ..gluon_even_split import end_of_keys, in_whole_shares, key_tiles, shares_of, tiles_before, tiles_of
from ..gluon_names import reinterpret, thread_barrier
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from ..masking import sees_first_keys
from ..shape import AttentionShape, shape_of
from . import warpgroup_loop as warpgroup
from .axes import along, in_3d
from .key_loop import attend, begin_tiles
from .many_rows_kernel import many_rows_kernel
from .operands import in_order, is_4_bit, sink_exponent
from .outputs import write_item
from .plan import FEW_ROWS, HopperDecodeConfig, width
from .queries import first_of, load_queries, rows_of, used_rows
from .staging import staging_of


@gluon.jit
def _begin_states(
    sinks, head, exists, begins, W: gl.constexpr, R: gl.constexpr, SINK: gl.constexpr, WARPGROUP: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Maxima [W, R] and sums [W, 16, R] of rows that have seen no key, but their sink if the item `begins` here: a sum
    of the first warp, whose state it is, or all warps'."""
    STATES: gl.constexpr = gl.SliceLayout(1, MMA)
    NOTHING: gl.constexpr = LEAST if WARPGROUP else -float("inf")
    m_i = gl.full([W, R], NOTHING, gl.float32, STATES)
    l_i = gl.zeros([W, 16, R], gl.float32, MMA)
    if sinks is not None:
        if begins:
            warp, key = gl.arange(0, W, along(0, MMA)), gl.arange(0, 16, along(1, MMA))
            sink = gl.load(sinks + head, mask=exists, other=-float("inf")).to(gl.float32) * LOG2E
            mine = (gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, STATES)), 1) == 0) | WARPGROUP
            m_i = gl.where(mine, gl.maximum(gl.expand_dims(sink - SINK, 0), NOTHING), m_i)
            first = in_3d(warp, 0) + in_3d(key, 1) == 0
            l_i = gl.where(first & (in_3d(sink, 2) != -float("inf")), 2.0**SINK, l_i)
    return m_i, l_i


@gluon.jit
def _together(acc, m_i, l_i, exchange, ROWS: gl.constexpr, V_CODES: gl.constexpr, MINE: gl.constexpr):
    """The states of all warps [W, ..] as one, the first ROWS rows of it, [ROWS, DV] and [ROWS] in layout MINE. Outputs
    by way of `exchange`: a reduction over warps would take each element through shared memory by itself."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MINE)
    W: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[2]
    m = gl.max(m_i, 0)
    weight = gl.exp2(m_i - gl.expand_dims(gl.where(m == -float("inf"), 0.0, m), 0))
    l_i = gl.sum(gl.sum(l_i, 1) * weight, 0)
    exchange.store(in_order(acc * gl.expand_dims(weight, 1), V_CODES))
    thread_barrier()
    acc = exchange.slice(0, ROWS).load(MINE)
    for i in gl.static_range(1, W):
        acc += exchange.slice(i * R, ROWS).load(MINE)
    thread_barrier()  # the next item's are not stored before
    return acc, first_of(m, ROWS, OF_ROWS), first_of(l_i, ROWS, OF_ROWS)


@gluon.jit(
    do_not_specialize=["num_seqs", "num_blocks", "max_keys", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _decode_kernel(
    query, key, value, out, lse_out, table, query_start_loc, seq_lens, sinks, alibi_slopes, k_scale, v_scale, workspace,
    prior, num_seqs, num_blocks, max_keys, qk_scale, out_scale, softcap, sq_t, sq_h, sk_b, sk_h, sv_b, sv_h, so_t,
    so_h, sl_t, s_table, s_kscale, s_vscale, k_scale_cache, v_scale_cache,
    S: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, R: gl.constexpr, W: gl.constexpr, OVERHEAD: gl.constexpr,
    CHUNK: gl.constexpr, MANY_SEQS: gl.constexpr, ONE_TOKEN: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    K_CODES: gl.constexpr, V_CODES: gl.constexpr, K_STRIDES: gl.constexpr, V_STRIDES: gl.constexpr, KEYS: gl.constexpr,
    K_SLOT: gl.constexpr, V_SLOT: gl.constexpr, ALIGNED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    QUERY: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    STATES: gl.constexpr = gl.SliceLayout(1, MMA)  # [W, R]
    MINE: gl.constexpr = gl.BlockedLayout([1, DV // 32], [1, 32], [W, 1], [1, 0])
    SINK: gl.constexpr = sink_exponent(V_STRIDES)
    CODES: gl.constexpr = (K_CODES, V_CODES)
    STRIDES: gl.constexpr = (K_STRIDES, V_STRIDES)
    SLOTS: gl.constexpr = (K_SLOT, V_SLOT)
    TILE: gl.constexpr = W * KEYS
    WARPGROUP: gl.constexpr = warpgroup.serves(R)
    BLOCK_Q: gl.constexpr = 1 if ONE_TOKEN else R // GROUP
    USED: gl.constexpr = used_rows(R, GROUP, ONE_TOKEN)
    kv_head = gl.program_id(0) % KV_HEADS
    program = gl.program_id(0) // KV_HEADS  # among those of its head
    programs = gl.num_programs(0) // KV_HEADS

    if CHUNK == 1:  # the only sequence: nothing to look for
        q_len = gl.load(query_start_loc + 1) - gl.load(query_start_loc)
        _, _, tiles = key_tiles(q_len, gl.load(seq_lens), max_keys, MASK, TILE, OVERHEAD)
        here = tiles * ((q_len + BLOCK_Q - 1) // BLOCK_Q)
    else:
        work = tiles_of(0, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, TILE, OVERHEAD, CHUNK, W)
        here = gl.sum(work, 0)
    total = here
    if MANY_SEQS:
        for more in range(CHUNK, num_seqs, CHUNK):
            next = tiles_of(
                more, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, TILE, OVERHEAD, CHUNK, W
            )
            total += gl.sum(next, 0)
    share = gl.maximum((total + programs - 1) // programs, 1)
    unit = 1
    if CHUNK > 1 and not MANY_SEQS:
        unit, share, work, total = in_whole_shares(work, total, share, programs, num_seqs, OVERHEAD)
    at = program * share
    end = gl.minimum(at + share, total)
    if at < end:
        first = 0
        base = 0
        if MANY_SEQS:
            for _ in range(CHUNK, num_seqs, CHUNK):
                if base + here <= at:
                    base += here
                    first += CHUNK
                    work = tiles_of(
                        first, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, TILE, OVERHEAD, CHUNK, W
                    )
                    here = gl.sum(work, 0)
        seq = first
        if CHUNK > 1:
            passed, tiles_passed = tiles_before(work, base, at)
            seq += passed
            base += tiles_passed

        staging = staging_of(
            key, value, k_scale_cache, v_scale_cache, kv_head, sk_b, sk_h, sv_b, sv_h, ALIGNED, D, DV,
            (HEAD_DIM, HEAD_DIM_V), W, KEYS, S, SLOTS, STRIDES, CODES,
        )  # fmt: skip
        ROWS: gl.constexpr = R if WARPGROUP else W * R
        EXCHANGE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8 if WARPGROUP else USED, [1, 0])
        if K_CODES == "native" or (WARPGROUP and not is_4_bit(K_CODES)):  # the place of tiles that are done with
            exchange = reinterpret(staging.keys, gl.float32, [ROWS, DV], EXCHANGE)
        else:
            exchange = gl.allocate_shared_memory(gl.float32, [ROWS, DV], EXCHANGE)
        rooms = ()
        if WARPGROUP:
            rooms = warpgroup.make_rooms(R, D, K_CODES)
        offs_m = gl.arange(0, R, along(2, MMA))
        while at < end:
            q_start = gl.load(query_start_loc + seq)
            q_len = gl.load(query_start_loc + seq + 1) - q_start
            seq_len = gl.load(seq_lens + seq)
            low, first_tile, tiles = key_tiles(q_len, seq_len, max_keys, MASK, TILE, OVERHEAD)
            if unit > 1:
                tiles = shares_of(tiles, unit) * unit
            past = base + tiles * ((q_len + BLOCK_Q - 1) // BLOCK_Q)
            q_block = (at - base) // gl.maximum(tiles, 1)
            close = base + (q_block + 1) * tiles
            origin = close - tiles + OVERHEAD
            if at >= past:
                base = past
                seq += 1
            elif end <= origin:  # nothing is left but an item's overhead
                at = end
            else:
                at = gl.maximum(at, origin)
                stop = gl.minimum(close, end)
                from_key = (first_tile + at - origin) * TILE
                to_key = gl.minimum((first_tile + stop - origin) * TILE, end_of_keys(seq_len, max_keys, MASK))
                if not sees_first_keys(MASK):  # a sequence longer than its table may have its window outside
                    to_key = gl.where(low < to_key, to_key, 0)
                blocks = table + seq.to(gl.int64) * s_table
                if from_key < to_key:  # before the queries are waited for
                    begin_tiles(staging, blocks, from_key, to_key, low, num_blocks, MMA)
                if WARPGROUP:
                    up, q_sum = warpgroup.load_queries(
                        query, sq_t, sq_h, q_start, q_len, q_block, kv_head, rooms, GROUP, BLOCK_Q, D, HEAD_DIM, R,
                        K_CODES,
                    )  # fmt: skip
                    up = gl.expand_dims(gl.convert_layout(up, gl.SliceLayout(0, STATES)), 0)
                else:
                    q, q_rest, up = load_queries(
                        query, sq_t, sq_h, q_start, q_len, q_block, kv_head, GROUP, BLOCK_Q, D, HEAD_DIM, R, USED, W,
                        K_CODES, QUERY,
                    )  # fmt: skip
                    up = gl.convert_layout(up, STATES)

                q_row, head, exists = rows_of(offs_m, q_len, q_block, kv_head, GROUP, BLOCK_Q)
                slope = 0.0
                if alibi_slopes is not None:
                    slope = gl.load(alibi_slopes + head, mask=exists, other=0.0).to(gl.float32)
                logit_scale = qk_scale
                if k_scale is not None:  # stored keys times their scale: the same as their logits times it
                    logit_scale *= gl.load(k_scale + kv_head * s_kscale)
                m_i, l_i = _begin_states(sinks, head, exists, at == origin, W, R, SINK, WARPGROUP, MMA)
                if WARPGROUP:
                    acc = gl.zeros([DV, R], gl.float32, warpgroup.output_layout(R))
                    if from_key < to_key:
                        acc, m_i, l_i = warpgroup.attend(
                            q_sum, up * logit_scale, acc, m_i, l_i, staging, rooms, blocks, from_key, to_key, low,
                            seq_len - q_len + q_row, slope, softcap, num_blocks, K_CODES, V_CODES, R, MASK, SOFTCAP,
                            alibi_slopes is not None, MMA,
                        )  # fmt: skip
                    all_acc, all_m, all_l = warpgroup.state_of(acc, m_i, l_i, exchange, V_CODES, MINE)
                else:
                    acc = gl.zeros([W, DV, R], gl.float32, MMA)
                    if from_key < to_key:
                        acc, m_i, l_i = attend(
                            q, q_rest, up * logit_scale, acc, m_i, l_i, staging, blocks, from_key, to_key, low,
                            seq_len - q_len + q_row, slope, softcap, num_blocks, K_CODES, V_CODES, R, MASK, SOFTCAP,
                            alibi_slopes is not None, ONE_TOKEN, MMA,
                        )  # fmt: skip
                    all_acc, all_m, all_l = _together(acc, m_i, l_i, exchange, USED, V_CODES, MINE)
                scale = out_scale
                if v_scale is not None:
                    scale *= gl.load(v_scale + kv_head * s_vscale)
                write_item(
                    all_acc, all_m, all_l, out, prior, lse_out, workspace, kv_head, program, q_start, q_len, q_block,
                    origin == at, stop == close, origin // share, (close - 1) // share, scale, so_t, so_h, sl_t,
                    HEAD_DIM_V, KV_HEADS, GROUP, BLOCK_Q, V_CODES, ACCUMULATE,
                )  # fmt: skip
                at = stop


_launch = Launcher(_decode_kernel, VARYING)
_launch_many_rows = Launcher(many_rows_kernel, VARYING)


def constants_of(
    shape: AttentionShape, config: HopperDecodeConfig, num_seqs: int, max_query_len: int, softcap: bool
) -> dict[str, Any]:
    """What the kernel is compiled for, but for the planes of scales."""
    chunk = 1 if num_seqs == 1 else 32 if num_seqs <= 32 else 256
    return {
        "S": shape.block_size,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "D": width(shape.head_dim),
        "DV": width(shape.head_dim_v),
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_V": shape.head_dim_v,
        "R": config.rows,
        "W": config.tuning.warps,
        "OVERHEAD": config.tuning.tile_overhead,
        "CHUNK": chunk,
        "MANY_SEQS": num_seqs > chunk,
        "ONE_TOKEN": max_query_len <= 1,
        "MASK": shape.mask,
        "SOFTCAP": softcap,
        "K_CODES": shape.codes[0] or "native",
        "V_CODES": shape.codes[1] or "native",
        "KEYS": config.tuning.keys,
    }


def launch(config: HopperDecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor) -> None:
    """One launch.

    `workspace`: int32 [config.workspace] or more, its first 3 * COUNTERS elements zero, as they are afterwards; nothing
    else may use it before this launch is done.
    """
    query, table, out, lse = inputs.query, inputs.block_table, inputs.out, inputs.lse
    key, value, k_scales = inputs.key.view(torch.int32), inputs.value.view(torch.int32), inputs.k_scale_cache
    if k_scales is not None and k_scales.shape[3] > 1:  # numbers of each channel
        k_scales = k_scales.view(torch.int32)
    if table is None:
        raise ValueError("packed keys have no blocks")
    num_seqs = len(inputs.seq_lens)
    arguments = (
        *(query, key, value, out, lse, table, inputs.query_start_loc, inputs.seq_lens),
        *(inputs.sinks, inputs.alibi_slopes, inputs.k_scale, inputs.v_scale, workspace, inputs.prior),
        *(num_seqs, len(key), key.shape[1] * table.shape[1], inputs.scale, inputs.out_scale, inputs.softcap),
        *query.stride()[:2],
        *(key.stride(0), key.stride(2), value.stride(0), value.stride(2)),
        *out.stride()[:2],
        *(0 if lse is None else lse.stride(0), table.stride(0)),
        *map(scale_stride, (inputs.k_scale, inputs.v_scale)),
        *(k_scales, inputs.v_scale_cache),
    )
    constants = constants_of(shape_of(inputs), config, num_seqs, inputs.max_query_len, inputs.softcap > 0)
    constants |= {"K_SLOT": key.stride(1), "V_SLOT": value.stride(1), "ACCUMULATE": inputs.accumulate}
    constants["ALIGNED"] = gcd(4, key.stride(2), value.stride(2))
    constants |= {"K_STRIDES": plane_strides(k_scales), "V_STRIDES": plane_strides(inputs.v_scale_cache)}
    options = {"num_warps": config.tuning.warps, "maxnreg": config.tuning.max_registers}
    run = _launch if config.rows <= FEW_ROWS else _launch_many_rows
    with on_device(query):
        run((config.programs,), arguments, constants, outputs_kept(inputs), **options)
