"""Triton: attention of a few new tokens per sequence over a paged cache, the keys shared out evenly, in one launch.

An item is the work of one (sequence, query block) for one KV head: its keys in tiles of BLOCK_N. A head's tiles, in the
order of the sequences, are cut into equal ranges, as many for each head as a grid that no length changes has programs;
each program finds its range from the lengths on the device. The programs of all heads over one range are neighbours:
they read the same blocks at the same time, which DRAM serves faster. An item that ranges cut leaves partial states in
the workspace, and the program that finishes last adds them up (no program waits). Source: stream-K (PPoPP 2023),
LeanAttention (2024).

Outputs and LSE may hold attention of the rows over other keys (`accumulate`), outputs also elsewhere, in float32
(`prior`): the program that has all of an item adds its own to them, so that merging the two costs no launch.

Where programs are enough, items are rounded up to whole ranges: a program with parts of two attends to one after the
other.

Legend: `at` a tile's number among a head's, `base` that of the sequence's first, `origin..close` the item's,
TILE_OVERHEAD empty ones in front of them for what an item costs by itself; a program handles tiles at..end.
`m_i` running maximum, `l_i` running sum and `acc` unnormalised output: together a state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.target import pdl_option
from ..even_split import end_of_keys, in_whole_shares, key_tiles, nearest_key, shares_of, tiles_of
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from ..masking import is_causal, sees_first_keys, visible
from ..planes import scale_rows
from ..products import products, rotated_queries
from ..softmax import LOG2E, features, log_base, scaled_logits, write_rows
from .plan import DecodeConfig
from .split_kv import publish_and_reduce


@triton.jit
def _attend(
    q, q_rest, acc, m_i, l_i, key, value, k_scales, v_scales, kv_head, table, begin, end, low, q_pos, slope, qk_scale,
    softcap, num_blocks, sk_b, sk_s, sv_b, sv_s, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_SCALE_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, ONE_TOKEN: tl.constexpr, SAME_STRIDES: tl.constexpr, PREFETCH_BLOCK_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after keys begin..end. A tile that reaches beyond low..end reads the nearest key within again and gives
    it no weight: loads need no mask, what lies outside is never read, and one loop serves whole and partial tiles.

    PREFETCH_BLOCK_TABLE: block ids are loaded an iteration early, by hand: as loads that other loads depend on, they
    would leave the compiler half of the stages for keys and values.
    """
    PRE: tl.constexpr = log_base(PRECISION)
    POST: tl.constexpr = LOG2E / PRE
    offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # With few rows every warp has columns of its own. Sums then stay apart by column until the end: added up in every
    # tile, warps would wait for each other once more.
    BY_COLUMN: tl.constexpr = q.shape[0] < 64
    if BY_COLUMN:
        l_i = tl.where(offs[None, :] == 0, l_i[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
    block = offs
    if PREFETCH_BLOCK_TABLE:
        block = tl.load(table + nearest_key(begin + offs, low, end, MASK) // S, mask=begin < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        offs_n = start + offs
        near = nearest_key(offs_n, low, end, MASK)
        if not PREFETCH_BLOCK_TABLE:
            block = tl.load(table + near // S)
        known = block.to(tl.uint32) < num_blocks.to(tl.uint32)  # negative ids are large ones
        row = tl.where(known, block, 0).to(tl.int64)
        slot = (near % S).to(tl.int32)
        k_row = row * sk_b + slot * sk_s
        v_row = k_row if SAME_STRIDES else row * sv_b + slot * sv_s
        if PREFETCH_BLOCK_TABLE:
            block = tl.load(table + nearest_key(offs_n + BLOCK_N, low, end, MASK) // S)
        k_scale_row = scale_rows(row, slot, kv_head, K_SCALE_STRIDES)
        v_scale_row = scale_rows(row, slot, kv_head, V_SCALE_STRIDES)
        k = K_FORMAT.load_tile(key, k_row, k_scales, k_scale_row, None, D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = products(q, q_rest, k, K_FORMAT.rotate is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if K_FORMAT.row_scale is not None:
            s *= K_FORMAT.row_scale(k_scales, k_scale_row, None)[None, :]
        distance = offs_n[None, :] - q_pos[:, None]
        s = scaled_logits(s, distance, slope, qk_scale, softcap, is_causal(MASK), SOFTCAP, ALIBI, PRECISION)
        keep = (known & (near.to(tl.int32) == offs_n))[None, :]
        if not ONE_TOKEN:  # a sequence's only row sees all of low..end
            keep = keep & visible(q_pos[:, None], offs_n[None, :], MASK)
        s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2((s - shift[:, None]) * POST)
        alpha = tl.exp2((m_i - shift) * POST)
        if BY_COLUMN:
            l_i = l_i * alpha[:, None] + p
        else:
            l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v = V_FORMAT.load_tile(value, v_row, v_scales, v_scale_row, None, DV, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        if V_FORMAT.row_scale is not None:
            p *= V_FORMAT.row_scale(v_scales, v_scale_row, None)[None, :]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
    if BY_COLUMN:
        l_i = tl.sum(l_i, 1)
    return acc, m_i, l_i


@triton.jit
def _finish(
    acc, m_i, l_i, offs_m, out, prior, lse_out, q_start, q_len, q_block, kv_head, in_group, out_scale, so_t, so_h, sl_t,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, BLOCK_Q: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, ROTATE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Write the output and LSE of an item's rows offs_m."""
    q_row, head, mask_m = _rows(offs_m, q_len, q_block, kv_head, in_group, GROUP, G, BLOCK_Q)
    token = (q_start + q_row).to(tl.int64)
    dim_v = tl.arange(0, BLOCK_DV)
    acc = acc * (out_scale / tl.where(l_i == 0, 1.0, l_i))[:, None]
    if ROTATE is not None:
        acc = ROTATE(acc, DV, BLOCK_DV)
    o_ptrs = out + token[:, None] * so_t + head[:, None] * so_h + dim_v[None, :]
    there_ptrs = o_ptrs
    if prior is not None:
        there_ptrs = prior + (token * (KV_HEADS * GROUP) + head)[:, None] * DV + dim_v[None, :]
    write_rows(
        acc, m_i, l_i, o_ptrs, there_ptrs, lse_out, token * sl_t + head, mask_m, (dim_v < DV)[None, :], PRECISION,
        ACCUMULATE,
    )  # fmt: skip


@triton.jit
def _rows(offs_m, q_len, q_block, kv_head, in_group, GROUP: tl.constexpr, G: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query token in the sequence, query head, and whether there is one, of an item's rows."""
    q_row = q_block * BLOCK_Q + offs_m // G
    of_group = in_group + offs_m % G
    # int64: heads may be further apart than int32 counts.
    return (
        q_row,
        (kv_head * GROUP + of_group).to(tl.int64),
        (offs_m < BLOCK_Q * G) & (q_row < q_len) & (of_group < GROUP),
    )


@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "max_keys", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _decode_kernel(
    query, key, value, out, lse_out, table, query_start_loc, seq_lens, sinks, alibi_slopes, k_scale, v_scale, workspace,
    prior, num_seqs, num_blocks, max_keys, qk_scale, out_scale, softcap,
    sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, so_t, so_h, sl_t, s_table, s_kscale, s_vscale,
    k_scale_cache, v_scale_cache,
    S: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    TILE_OVERHEAD: tl.constexpr, FAN_IN: tl.constexpr, REDUCTION_UNROLL: tl.constexpr, CHUNK: tl.constexpr,
    MANY_SEQS: tl.constexpr, ONE_TOKEN: tl.constexpr, ONE_BLOCK: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, SAME_STRIDES: tl.constexpr, PREFETCH_BLOCK_TABLE: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_SCALE_STRIDES: tl.constexpr,
    V_SCALE_STRIDES: tl.constexpr, ROTATE_OUT: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    if PDL:  # nothing is read, and no place of the workspace written, before what came before is done
        tl.extra.cuda.gdc_wait()
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    HEAD_PARTS: tl.constexpr = (GROUP + G - 1) // G
    PARTS: tl.constexpr = KV_HEADS * HEAD_PARTS
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS  # among those of its head
    kv_head = part // HEAD_PARTS
    in_group = part % HEAD_PARTS * G

    programs = tl.num_programs(0) // PARTS
    seq = 0
    base = 0
    unit = 1
    if CHUNK == 1:  # the only sequence: nothing to look for
        q_start = tl.load(query_start_loc)
        q_len = tl.load(query_start_loc + 1) - q_start
        seq_len = tl.load(seq_lens)
        low, first_tile, tiles = key_tiles(q_len, seq_len, max_keys, MASK, BLOCK_N, TILE_OVERHEAD)
        total = tiles * tl.cdiv(q_len, BLOCK_Q)
    else:
        work = tiles_of(0, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N, TILE_OVERHEAD, CHUNK)
        here = tl.sum(work, 0)
        total = here
        if MANY_SEQS:
            for more in range(CHUNK, num_seqs, CHUNK):
                next = tiles_of(
                    more, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N, TILE_OVERHEAD, CHUNK
                )
                total += tl.sum(next, 0)
    share = tl.maximum(tl.cdiv(total, programs), 1)
    if CHUNK > 1 and ONE_BLOCK and not MANY_SEQS:
        unit, share, work, total = in_whole_shares(work, total, share, programs, num_seqs, TILE_OVERHEAD)
    at = program * share
    end = tl.minimum(at + share, total)
    if at >= end:
        return
    if CHUNK > 1:
        first = 0
        if MANY_SEQS:
            # Not a while loop: behind one, Triton from 3.7 on no longer sees that rows of keys are contiguous.
            for _ in range(CHUNK, num_seqs, CHUNK):
                if base + here <= at:
                    base += here
                    first += CHUNK
                    work = tiles_of(
                        first, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N,
                        TILE_OVERHEAD, CHUNK,
                    )  # fmt: skip
                    here = tl.sum(work, 0)
        before = tl.cumsum(work, 0) + base <= at
        seq = first + tl.sum(before.to(tl.int32), 0)
        base += tl.sum(tl.where(before, work, 0), 0)

    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    while at < end:
        if CHUNK > 1:
            q_start = tl.load(query_start_loc + seq)
            q_len = tl.load(query_start_loc + seq + 1) - q_start
            seq_len = tl.load(seq_lens + seq)
            low, first_tile, tiles = key_tiles(q_len, seq_len, max_keys, MASK, BLOCK_N, TILE_OVERHEAD)
            if unit > 1:
                tiles = shares_of(tiles, unit) * unit
        past = base + tiles * tl.cdiv(q_len, BLOCK_Q)
        q_block = 0 if ONE_BLOCK else (at - base) // tl.maximum(tiles, 1)
        close = base + (q_block + 1) * tiles
        origin = close - tiles + TILE_OVERHEAD
        if at >= past:
            base = past
            seq += 1
        elif end <= origin:  # nothing is left but an item's overhead
            at = end
        else:
            at = tl.maximum(at, origin)
            stop = tl.minimum(close, end)
            q_row, head, mask_m = _rows(offs_m, q_len, q_block, kv_head, in_group, GROUP, G, BLOCK_Q)
            token = (q_start + q_row).to(tl.int64)
            q_ptrs = query + token[:, None] * sq_t + head[:, None] * sq_h + dim[None, :]
            q = tl.load(q_ptrs, mask=mask_m[:, None] & (dim < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
            q_rest = q
            if K_FORMAT.rotate is not None:
                q, q_rest = rotated_queries(q, K_FORMAT.rotate, D, BLOCK_D)
            slope = 0.0
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + head, mask=mask_m, other=0.0).to(tl.float32)  # [BLOCK_M]
            logit_scale = qk_scale
            if k_scale is not None:  # stored keys times their scale: the same as their logits times it
                logit_scale *= tl.load(k_scale + kv_head * s_kscale)
            m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
            if sinks is not None:
                if at == origin:
                    m_i = tl.load(sinks + head, mask=mask_m, other=0.0).to(tl.float32) * log_base(PRECISION)
                    l_i = tl.where(m_i == -float("inf"), 0.0, 1.0)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            from_key = (first_tile + at - origin) * BLOCK_N
            to_key = tl.minimum((first_tile + stop - origin) * BLOCK_N, end_of_keys(seq_len, max_keys, MASK))
            if not sees_first_keys(MASK):  # a sequence longer than its table may have its window outside
                to_key = tl.where(low < to_key, to_key, 0)
            acc, m_i, l_i = _attend(
                q, q_rest, acc, m_i, l_i, key + kv_head.to(tl.int64) * sk_h, value + kv_head.to(tl.int64) * sv_h,
                k_scale_cache, v_scale_cache, kv_head,
                table + seq * tl.cast(s_table, tl.int64), from_key, to_key, low, seq_len - q_len + q_row, slope,
                logit_scale, softcap, num_blocks, sk_b, sk_s, sv_b, sv_s, K_FORMAT, V_FORMAT, K_SCALE_STRIDES,
                V_SCALE_STRIDES, S, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, MASK, SOFTCAP, alibi_slopes is not None,
                ONE_TOKEN, SAME_STRIDES, PREFETCH_BLOCK_TABLE, PRECISION,
            )  # fmt: skip

            scale = out_scale
            if v_scale is not None:
                scale *= tl.load(v_scale + kv_head * s_vscale)
            begins = origin == at
            if begins & (stop == close):
                _finish(
                    acc, m_i, l_i, offs_m, out, prior, lse_out, q_start, q_len, q_block, kv_head, in_group, scale, so_t,
                    so_h, sl_t, KV_HEADS, GROUP, G, BLOCK_Q, DV, BLOCK_DV, PRECISION, ROTATE_OUT, ACCUMULATE,
                )  # fmt: skip
            else:
                complete, all_acc, all_m, all_l = publish_and_reduce(
                    acc, m_i, l_i, workspace, part, program, begins, origin // share, (close - 1) // share, PARTS,
                    BLOCK_M, ROWS, BLOCK_DV, FAN_IN, REDUCTION_UNROLL, PRECISION,
                )  # fmt: skip
                if complete:
                    _finish(
                        all_acc, all_m, all_l, tl.arange(0, ROWS), out, prior, lse_out, q_start, q_len, q_block,
                        kv_head, in_group, scale, so_t, so_h, sl_t, KV_HEADS, GROUP, G, BLOCK_Q, DV, BLOCK_DV,
                        PRECISION, ROTATE_OUT, ACCUMULATE,
                    )  # fmt: skip
            at = stop


_launch = Launcher(_decode_kernel, VARYING)


def launch(config: DecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor) -> None:
    """One launch.

    `workspace`: int32 [config.workspace] or more, its first 3 * COUNTERS elements zero, as they are afterwards; nothing
    else may use it before this launch is done.
    """
    query, key, value, table, out, lse = (*inputs[:4], inputs.out, inputs.lse)
    num_seqs, tuning = len(inputs.seq_lens), config.tuning
    chunk = 1 if num_seqs == 1 else 32 if num_seqs <= 32 else 256
    arguments = (
        *(query, key, value, out, lse, table, inputs.query_start_loc, inputs.seq_lens),
        *(inputs.sinks, inputs.alibi_slopes, inputs.k_scale, inputs.v_scale, workspace, inputs.prior),
        *(num_seqs, len(key), key.shape[1] * table.shape[1], inputs.scale, inputs.out_scale, inputs.softcap),
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *out.stride()[:2],
        *(0 if lse is None else lse.stride(0), table.stride(0)),
        *map(scale_stride, (inputs.k_scale, inputs.v_scale)),
        *(inputs.k_scale_cache, inputs.v_scale_cache),
    )
    constants = {
        **features(inputs),
        "S": key.shape[1],
        "KV_HEADS": key.shape[2],
        "G": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": tuning.block_n,
        "ROWS": config.rows,
        "TILE_OVERHEAD": tuning.tile_overhead,
        "FAN_IN": tuning.fan_in,
        "REDUCTION_UNROLL": config.reduction_unroll,
        "CHUNK": chunk,
        "MANY_SEQS": num_seqs > chunk,
        "ONE_TOKEN": inputs.max_query_len <= 1,
        "ONE_BLOCK": inputs.max_query_len <= config.block_m // config.heads,
        "SAME_STRIDES": key.stride()[:3] == value.stride()[:3],
        "PREFETCH_BLOCK_TABLE": tuning.prefetch_block_table,
        "PDL": config.supports_pdl,
        "ROTATE_OUT": inputs.format.value.kernels.rotate,
        "ACCUMULATE": inputs.accumulate,
    }
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages, "maxnreg": tuning.max_registers}
    with on_device(query):
        kept = outputs_kept(inputs)
        _launch((config.programs,), arguments, constants, kept, **options, **pdl_option(config.supports_pdl))
