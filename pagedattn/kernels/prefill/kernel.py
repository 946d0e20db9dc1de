"""Triton: attention over a paged cache (or packed keys) for sequences of any number of new tokens.

Legend: a program handles BLOCK_M rows = BLOCK_Q query tokens x G of the GROUP query heads that share one KV head
(all of them where they fit, so that keys and values are read once); `offs_m` rows, `offs_n` keys, `m_i` running
maximum and `l_i` running sum, `acc` the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..inputs import VARYING, AttentionInputs, outputs_kept, scale_stride
from ..masking import end_key, first_key, is_causal, sees_first_keys, visible
from ..planes import scale_rows
from ..products import products, rotated_queries
from ..softmax import LOG2E, features, log_base, scaled_logits, write_rows
from .plan import AttentionConfig


@triton.jit
def _attend(
    q, q_rest, acc, m_i, l_i, key, value, k_scales, v_scales, kv_head, table, begin, end, low, q_pos, slope, qk_scale,
    softcap, num_blocks, sk_b, sk_s, sv_b, sv_s, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_SCALE_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys begin..end in tiles of BLOCK_N. Unmasked tiles are seen whole by every row; low..end is seen by some."""
    PRE: tl.constexpr = log_base(PRECISION)
    POST: tl.constexpr = LOG2E / PRE
    for start in tl.range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        seen = (offs_n >= low) & (offs_n < end)
        if PAGED:
            if MASKED:
                block = tl.load(table + offs_n // S, mask=seen, other=0)
            else:
                block = tl.load(table + offs_n // S)
            known = (block >= 0) & (block < num_blocks)
            row = tl.where(known, block, 0).to(tl.int64)
            k_row = row * sk_b + (offs_n % S) * sk_s
            v_row = row * sv_b + (offs_n % S) * sv_s
            k_scale_row = scale_rows(row, offs_n % S, kv_head, K_SCALE_STRIDES)
            v_scale_row = scale_rows(row, offs_n % S, kv_head, V_SCALE_STRIDES)
        else:
            known = offs_n >= 0
            k_row = offs_n.to(tl.int64) * sk_s
            v_row = offs_n.to(tl.int64) * sv_s
            k_scale_row = k_row
            v_scale_row = v_row
        k_seen = seen if MASKED else None
        v_seen = seen & known if MASKED else None  # unseen rows are zeroed, since 0 * NaN would reach the output
        k = K_FORMAT.load_tile(key, k_row, k_scales, k_scale_row, k_seen, D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = products(q, q_rest, k, K_FORMAT.rotate is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if K_FORMAT.row_scale is not None:
            s *= K_FORMAT.row_scale(k_scales, k_scale_row, k_seen)[None, :]
        distance = offs_n[None, :] - q_pos[:, None]
        s = scaled_logits(s, distance, slope, qk_scale, softcap, is_causal(MASK), SOFTCAP, ALIBI, PRECISION)
        keep = known[None, :]
        if MASKED:
            keep = keep & seen[None, :] & visible(q_pos[:, None], offs_n[None, :], MASK)
        s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2((s - shift[:, None]) * POST)
        alpha = tl.exp2((m_i - shift) * POST)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v = V_FORMAT.load_tile(value, v_row, v_scales, v_scale_row, v_seen, DV, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        if V_FORMAT.row_scale is not None:
            p *= V_FORMAT.row_scale(v_scales, v_scale_row, v_seen)[None, :]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_i, l_i


@triton.jit
def _find_seq(block, query_start_loc, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence whose query blocks hold `block`, when sequence b starts at block start_b // BLOCK_Q + b."""
    origin = tl.load(query_start_loc)
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(query_start_loc + middle) - origin) // BLOCK_Q + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    return seq, block - ((tl.load(query_start_loc + seq) - origin) // BLOCK_Q + seq)


@triton.jit(do_not_specialize=["num_seqs", "num_blocks", "max_keys", "s_table"])
def _paged_attention_kernel(
    query, key, value, out, lse_out, table, query_start_loc, seq_lens, key_start_loc, sinks, alibi_slopes, k_scale,
    v_scale, num_seqs, num_blocks, max_keys, qk_scale, out_scale, softcap, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s,
    sv_h, so_t, so_h, sl_t, s_table, s_kscale, s_vscale, k_scale_cache, v_scale_cache, prior, S: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    ONE_LOOP: tl.constexpr, PRECISION: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_SCALE_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    ALIBI: tl.constexpr = alibi_slopes is not None
    PAGED: tl.constexpr = table is not None
    PARTS: tl.constexpr = (GROUP + G - 1) // G
    kv_head = tl.program_id(1) // PARTS
    in_group = tl.program_id(1) % PARTS * G
    seq, q_block = _find_seq(tl.program_id(0), query_start_loc, num_seqs, BLOCK_Q)
    q_start = tl.load(query_start_loc + seq)
    q_len = tl.load(query_start_loc + seq + 1) - q_start
    if q_block * BLOCK_Q >= q_len:
        return
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - q_len

    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    q_row = q_block * BLOCK_Q + offs_m // G
    head = (kv_head * GROUP + in_group + offs_m % G).to(tl.int64)  # heads may be further apart than int32 counts
    mask_m = (offs_m < BLOCK_Q * G) & (q_row < q_len) & (in_group + offs_m % G < GROUP)
    q_pos = context + q_row
    dim = tl.arange(0, BLOCK_D)
    token = (q_start + q_row).to(tl.int64)
    q_ptrs = query + token[:, None] * sq_t + head[:, None] * sq_h + dim[None, :]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & (dim < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    q_rest = q
    if K_FORMAT.rotate is not None:
        q, q_rest = rotated_queries(q, K_FORMAT.rotate, D, BLOCK_D)
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=mask_m, other=0.0).to(tl.float32)  # [BLOCK_M]

    if k_scale is not None:  # stored keys times their scale: the same as their logits times it
        qk_scale *= tl.load(k_scale + kv_head * s_kscale)
    first_pos = context + q_block * BLOCK_Q
    last_pos = context + tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1
    # Never past the table's width, or past the packed keys that there are.
    high = tl.minimum(seq_len, max_keys if PAGED else max_keys - tl.load(key_start_loc + seq).to(tl.int32))
    high = end_key(last_pos, high, MASK)
    low = tl.maximum(first_key(first_pos, MASK), 0)
    begin = low // BLOCK_N * BLOCK_N

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        m_i = tl.load(sinks + head, mask=mask_m, other=0.0).to(tl.float32) * log_base(PRECISION)
        l_i = tl.where(m_i == -float("inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if PAGED:
        table += seq * tl.cast(s_table, tl.int64)
        key += kv_head.to(tl.int64) * sk_h
        value += kv_head.to(tl.int64) * sv_h
    else:
        key_start = tl.load(key_start_loc + seq).to(tl.int64)
        key += key_start * sk_s + kv_head.to(tl.int64) * sk_h
        value += key_start * sv_s + kv_head.to(tl.int64) * sv_h

    # Tiles before `middle` are seen whole by every row and need no mask. ONE_LOOP masks all: which tiles are whole
    # depends on the chunk a row comes in, and its bits must not.
    middle = begin
    if sees_first_keys(MASK) and not ONE_LOOP:
        whole = end_key(first_pos, high, MASK)
        middle = tl.maximum(begin, begin + (whole - begin) // BLOCK_N * BLOCK_N)
        acc, m_i, l_i = _attend(
            q, q_rest, acc, m_i, l_i, key, value, k_scale_cache, v_scale_cache, kv_head, table, begin, middle, low,
            q_pos, slope, qk_scale, softcap, num_blocks, sk_b, sk_s, sv_b, sv_s, K_FORMAT, V_FORMAT,
            K_SCALE_STRIDES, V_SCALE_STRIDES, S, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGED, MASK, SOFTCAP, ALIBI,
            False, PRECISION,
        )  # fmt: skip
    acc, m_i, l_i = _attend(
        q, q_rest, acc, m_i, l_i, key, value, k_scale_cache, v_scale_cache, kv_head, table, middle, high, low, q_pos,
        slope, qk_scale, softcap, num_blocks, sk_b, sk_s, sv_b, sv_s, K_FORMAT, V_FORMAT, K_SCALE_STRIDES,
        V_SCALE_STRIDES, S, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGED, MASK, SOFTCAP, ALIBI, True, PRECISION,
    )  # fmt: skip

    if v_scale is not None:
        out_scale *= tl.load(v_scale + kv_head * s_vscale)
    acc = acc * (out_scale / tl.where(l_i == 0, 1.0, l_i))[:, None]
    if V_FORMAT.rotate is not None:
        acc = V_FORMAT.rotate(acc, DV, BLOCK_DV)
    dim_v = tl.arange(0, BLOCK_DV)
    o_ptrs = out + token[:, None] * so_t + head[:, None] * so_h + dim_v[None, :]
    there_ptrs = o_ptrs
    if prior is not None:
        heads = tl.num_programs(1) // PARTS * GROUP
        there_ptrs = prior + (token * heads + head)[:, None] * DV + dim_v[None, :]
    write_rows(
        acc, m_i, l_i, o_ptrs, there_ptrs, lse_out, token * sl_t + head, mask_m, (dim_v < DV)[None, :], PRECISION,
        ACCUMULATE,
    )  # fmt: skip


_launch = Launcher(_paged_attention_kernel, VARYING)


def launch(config: AttentionConfig, inputs: AttentionInputs, key_start_loc: torch.Tensor | None) -> None:
    """One launch.

    `key_start_loc` [B + 1] says where each sequence's packed keys start; None with a block table.
    """
    query, key, value, table, out, lse = (*inputs[:4], inputs.out, inputs.lse)
    paged, num_seqs = table is not None, len(inputs.seq_lens)
    blocks = len(query) // (config.block_m // config.heads) + num_seqs
    arguments = (
        *(query, key, value, out, lse, table, inputs.query_start_loc, inputs.seq_lens, key_start_loc),
        *(inputs.sinks, inputs.alibi_slopes, inputs.k_scale, inputs.v_scale),
        *(num_seqs, len(key) if paged else 0, key.shape[1] * table.shape[1] if paged else len(key)),
        *(inputs.scale, inputs.out_scale, inputs.softcap),
        *query.stride()[:2],
        *(key.stride()[:3] if paged else (0, *key.stride()[:2])),
        *(value.stride()[:3] if paged else (0, *value.stride()[:2])),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        table.stride(0) if paged else 0,
        *map(scale_stride, (inputs.k_scale, inputs.v_scale)),
        *(inputs.k_scale_cache, inputs.v_scale_cache, inputs.prior),
    )
    constants = {
        **features(inputs),
        "S": key.shape[1] if paged else 1,
        "G": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "ONE_LOOP": inputs.deterministic,
        "ACCUMULATE": inputs.accumulate,
    }
    grid = (blocks, key.shape[-2] * -(-constants["GROUP"] // config.heads))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with on_device(query):
        _launch(grid, arguments, constants, outputs_kept(inputs), **options)
