"""Triton: absorbed latent attention (MLA) of new tokens over a paged cache of latent rows, in one or two launches.

All heads read one row per token, [latent | rotated]: logits are two products, of the latent and of the rotated parts,
and the value is the latent part of the tile that is there already, so that a row is loaded once. An item is the work
of one (sequence, query block); its rows are tokens x heads. The items' tiles are cut into equal ranges, one per program
(`../even_split.py`). Items that ranges cut leave partial states in the workspace, which a second launch adds up, one
program per output row: 64 rows of 512 elements fill a program's registers, so that no program could add up states of
its size. Source: FlashMLA (2025) for one load of the row, stream-K (PPoPP 2023) for the split.

Legend: as in `../decode/kernel.py`. L latent and R rotated elements of a row; `part` which of the groups of G heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...formats.mla_rows.deepseek import views
from ...formats.mla_rows.device import GROUP, UNIT, inside, load_group, load_part, load_rope_bits, load_scale
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.target import pdl_option
from ..even_split import end_of_keys, first_tile_of, key_tiles, nearest_key, program_of, tiles_of
from ..inputs import VARYING, AttentionInputs
from ..masking import is_causal, sees_first_keys, visible
from ..softmax import LN2, LOG2E, log_base, scaled_logits
from .plan import MLADecodeConfig


@triton.jit
def _attend_latent(
    q_latent, q_rope, acc, m_i, l_i, rows, scales, halves, table, begin, end, low, q_pos, qk_scale, softcap, num_blocks,
    s_b, s_s, S: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after keys begin..end. A tile that reaches beyond low..end reads the nearest key within again and gives
    it no weight. Rows of blocks that are not in the cache are zeros: a value is multiplied with its weight 0.

    q_latent and acc are tuples of GROUPS tensors [BLOCK_M, WIDTH]. Where rows have scales, one for each group of a row,
    codes are operands as they are: logits of a group are multiplied with its scales, and so are the weights, times
    UNIT, before they are rounded.

    Block ids are loaded an iteration early, by hand: as loads that other loads depend on, they would leave the compiler
    half of the stages for rows.
    """
    POST: tl.constexpr = LOG2E / log_base(PRECISION)
    offs = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    block = tl.load(table + nearest_key(begin + offs, low, end, MASK) // S, mask=begin < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        offs_n = start + offs
        near = nearest_key(offs_n, low, end, MASK)
        known = block.to(tl.uint32) < num_blocks.to(tl.uint32)  # negative ids are large ones
        at = tl.where(known, block, 0).to(tl.int64) * s_b + (near % S).to(tl.int32) * s_s
        block = tl.load(table + nearest_key(offs_n + BLOCK_N, low, end, MASK) // S)
        if scales is None:
            latent, factor = (load_part(rows, at, known, 0, L, BLOCK_L).to(q_rope.dtype),), None
            s = tl.dot(q_latent[0], tl.trans(latent[0]), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if R > 0:
                rope = load_part(rows, at, known, L, R, BLOCK_R).to(q_rope.dtype)  # [BLOCK_N, BLOCK_R]
                s = tl.dot(q_rope, tl.trans(rope), s, input_precision=PRECISION)
        else:
            latent, factor = (), ()
            rope = load_rope_bits(halves, at, known, q_rope.dtype)  # [BLOCK_N, BLOCK_R]
            s = tl.dot(q_rope, tl.trans(rope), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            for g in tl.static_range(GROUPS):
                latent += (load_group(rows, at, known, g, q_rope.dtype),)  # of [BLOCK_N, WIDTH]
                factor += (load_scale(scales, at, known, g),)  # of [BLOCK_N]
                s += tl.dot(q_latent[g], tl.trans(latent[g]), input_precision=PRECISION) * factor[g][None, :]
        distance = offs_n[None, :] - q_pos[:, None]
        s = scaled_logits(s, distance, 0.0, qk_scale, softcap, is_causal(MASK), SOFTCAP, False, PRECISION)
        keep = (known & (near.to(tl.int32) == offs_n))[None, :] & visible(q_pos[:, None], offs_n[None, :], MASK)
        s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2((s - shift[:, None]) * POST)
        alpha = tl.exp2((m_i - shift) * POST)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        sums = ()
        for g in tl.static_range(GROUPS):
            weight = p if factor is None else p * (factor[g] * UNIT)[None, :]
            total = acc[g] * alpha[:, None]
            total = tl.dot(weight.to(latent[g].dtype), latent[g], total, input_precision=PRECISION)
            sums += (total,)
        acc = sums
    return acc, m_i, l_i


@triton.jit
def _query_rows(offs_m, q_len, q_block, part, HEADS: tl.constexpr, G: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query token in the sequence, head, and whether there is one, of an item's rows."""
    q_row = q_block * BLOCK_Q + offs_m // G
    head = part * G + offs_m % G
    return q_row, head.to(tl.int64), (offs_m < BLOCK_Q * G) & (q_row < q_len) & (head < HEADS)


@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "max_keys", "max_tokens", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def _mla_decode_kernel(
    query, key, scales, halves, out, lse_out, table, query_start_loc, seq_lens, k_scale, splits, states, num_seqs,
    num_blocks, max_keys, max_tokens, qk_scale, out_scale, softcap, sq_t, sq_h, sk_b, sk_s, so_t, so_h, sl_t, s_table,
    S: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_OVERHEAD: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, E4M3: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:  # nothing is read, and no place of the workspace written, before what came before is done
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    GROUPS: tl.constexpr = 1 if scales is None else BLOCK_L // GROUP
    WIDTH: tl.constexpr = BLOCK_L // GROUPS
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS  # among those of its part
    work = tiles_of(0, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N, TILE_OVERHEAD, CHUNK)
    here = tl.sum(work, 0)
    total = here
    for more in range(CHUNK, num_seqs, CHUNK):
        next = tiles_of(
            more, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N, TILE_OVERHEAD, CHUNK
        )
        total += tl.sum(next, 0)
    programs = tl.num_programs(0) // PARTS
    at = first_tile_of(program, programs, total)
    end = tl.minimum(first_tile_of(program + 1, programs, total), total)
    if at >= end:
        return
    # The sequence that tile `at` belongs to. Neither a while loop nor a function of its own: behind either, Triton from
    # 3.7 on no longer sees that rows are contiguous, and copies nothing asynchronously.
    first = 0
    base = 0
    for _ in range(CHUNK, num_seqs, CHUNK):
        if base + here <= at:
            base += here
            first += CHUNK
            work = tiles_of(
                first, query_start_loc, seq_lens, num_seqs, max_keys, BLOCK_Q, MASK, BLOCK_N, TILE_OVERHEAD, CHUNK
            )
            here = tl.sum(work, 0)
    before = tl.cumsum(work, 0) + base <= at
    seq = first + tl.sum(before.to(tl.int32), 0)
    base += tl.sum(tl.where(before, work, 0), 0)

    if scales is not None:
        out_scale /= UNIT
    if k_scale is not None:  # stored rows times their scale: logits and latents times it
        qk_scale *= tl.load(k_scale)
        out_scale *= tl.load(k_scale)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim_l = tl.arange(0, WIDTH)  # [WIDTH]
    dim_r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    while at < end:
        q_start = tl.load(query_start_loc + seq)
        q_len = tl.load(query_start_loc + seq + 1) - q_start
        seq_len = tl.load(seq_lens + seq)
        low, first_tile, tiles = key_tiles(q_len, seq_len, max_keys, MASK, BLOCK_N, TILE_OVERHEAD)
        past = base + tiles * tl.cdiv(q_len, BLOCK_Q)
        q_block = (at - base) // tl.maximum(tiles, 1)
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
            q_row, head, mask_m = _query_rows(offs_m, q_len, q_block, part, HEADS, G, BLOCK_Q)
            token = (q_start + q_row).to(tl.int64)
            q_ptrs = query + (token * sq_t + head * sq_h)[:, None]
            mask_l = inside(mask_m, dim_l, L, BLOCK_L)
            q_latent, acc = (), ()
            for g in tl.static_range(GROUPS):
                q_latent += (tl.load(q_ptrs + g * WIDTH + dim_l[None, :], mask=mask_l, other=0.0),)
                acc += (tl.zeros([BLOCK_M, WIDTH], tl.float32),)
            q_rope = tl.load(q_ptrs + L + dim_r[None, :], mask=inside(mask_m, dim_r, R, BLOCK_R), other=0.0)
            m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
            from_key = (first_tile + at - origin) * BLOCK_N
            to_key = tl.minimum((first_tile + stop - origin) * BLOCK_N, end_of_keys(seq_len, max_keys, MASK))
            if not sees_first_keys(MASK):  # a sequence longer than its table may have its window outside
                to_key = tl.where(low < to_key, to_key, 0)
            acc, m_i, l_i = _attend_latent(
                q_latent, q_rope, acc, m_i, l_i, key, scales, halves, table + seq * tl.cast(s_table, tl.int64),
                from_key, to_key, low, seq_len - q_len + q_row, qk_scale, softcap, num_blocks, sk_b, sk_s, S, L, R,
                BLOCK_L, BLOCK_R, BLOCK_N, GROUPS, MASK, SOFTCAP, PRECISION,
            )  # fmt: skip
            if E4M3:
                sums = ()
                for g in tl.static_range(GROUPS):
                    sums += (acc[g] * out_scale,)
                acc = sums
            begins = origin == at
            if splits is not None:
                if begins:  # says for all of the item's rows which programs have parts of them
                    field = (token * PARTS + part) * 3
                    told = mask_m & (offs_m % G == 0) & (token < max_tokens)
                    tl.store(splits + field, program_of(origin, programs, total), mask=told)
                    tl.store(splits + field + 1, program_of(close - 1, programs, total), mask=told)
                    tl.store(splits + field + 2, offs_m, mask=told)
            if begins & (stop == close):
                o_ptrs = out + (token * so_t + head * so_h)[:, None] + dim_l[None, :]
                for g in tl.static_range(GROUPS):
                    whole = acc[g] / tl.where(l_i == 0, 1.0, l_i)[:, None]
                    tl.store(o_ptrs + g * WIDTH, whole.to(out.dtype.element_ty), mask=mask_l)
                if lse_out is not None:
                    lse = tl.where(l_i == 0, -float("inf"), m_i / log_base(PRECISION) + tl.log2(l_i) * LN2)
                    tl.store(lse_out + token * sl_t + head, lse, mask=mask_m)
            else:
                if splits is not None:
                    # A program may end inside one item and start inside another: it has two places.
                    place = 2 * tl.program_id(0) + tl.where(begins, 1, 0)
                    state = states + place.to(tl.int64) * (2 * BLOCK_M + BLOCK_M * BLOCK_L)
                    tl.store(state + offs_m, m_i.to(tl.int32, bitcast=True), mask=mask_m)
                    tl.store(state + BLOCK_M + offs_m, l_i.to(tl.int32, bitcast=True), mask=mask_m)
                    a_ptrs = state + 2 * BLOCK_M + offs_m[:, None] * BLOCK_L + dim_l[None, :]
                    for g in tl.static_range(GROUPS):
                        tl.store(a_ptrs + g * WIDTH, acc[g].to(tl.int32, bitcast=True), mask=mask_l)
            at = stop


@triton.jit
def _sum_of_states(
    states, row, part, first, last, dim, PARTS: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """The sum of a row's states of programs first..last, of elements `dim` of its outputs, UNROLL states at a time in
    the programs' order: its maximum, its sum of weights, and the outputs times that."""
    SIZE: tl.constexpr = 2 * BLOCK_M + BLOCK_M * BLOCK_L
    nth = tl.arange(0, UNROLL)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros([dim.shape[0]], tl.float32)
    for done in range(first, last + 1, UNROLL):
        program = done + nth  # [UNROLL]
        live = program <= last
        place = 2 * (program * PARTS + part) + tl.where(program == first, 1, 0)
        state = states + place.to(tl.int64) * SIZE
        m = tl.load(state + row, mask=live, other=-(1 << 23)).to(tl.float32, bitcast=True)  # the bits of -inf
        l_s = tl.load(state + BLOCK_M + row, mask=live, other=0).to(tl.float32, bitcast=True)
        outputs = (state + 2 * BLOCK_M + row * BLOCK_L)[:, None] + dim[None, :]  # [UNROLL, DIMS]
        a = tl.load(outputs, mask=inside(live, dim, L, BLOCK_L), other=0).to(tl.float32, bitcast=True)
        m_new = tl.maximum(m_i, tl.max(m, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2((m - shift) * POST)
        alpha = tl.exp2((m_i - shift) * POST)
        l_i = l_i * alpha + tl.sum(l_s * weight, 0)
        acc = acc * alpha + tl.sum(a * weight[:, None], 0)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit(
    do_not_specialize=["num_seqs", "max_tokens"], do_not_specialize_on_alignment=["query_start_loc"],
)  # fmt: skip
def _merge_kernel(
    splits, states, out, lse_out, query_start_loc, num_seqs, max_tokens, so_t, so_h, sl_t, HEADS: tl.constexpr,
    G: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr,
    DIMS: tl.constexpr, UNROLL: tl.constexpr, SOME: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up DIMS elements of the partial states of an output row, for SOME heads of a token that has such states."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    POST: tl.constexpr = LOG2E / log_base(PRECISION)
    PER_PART: tl.constexpr = (G + SOME - 1) // SOME
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) // PER_PART
    begin = tl.program_id(1) % PER_PART * SOME  # of the part's heads
    first = 0
    last = 0
    row = 0
    if token < tl.minimum(tl.load(query_start_loc + num_seqs), max_tokens):  # others are padding
        field = splits + (token * PARTS + part) * 3
        first = tl.load(field)
        last = tl.load(field + 1)
        row = tl.load(field + 2)
    if first < last:
        dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
        for nth in range(begin, tl.minimum(tl.minimum(begin + SOME, G), HEADS - part * G)):
            m_i, l_i, acc = _sum_of_states(
                states, row + nth, part, first, last, dim, PARTS, L, BLOCK_L, BLOCK_M, UNROLL, POST
            )
            head = part * G + nth
            acc = acc / tl.where(l_i == 0, 1.0, l_i)
            tl.store(out + token * so_t + head * so_h + dim, acc.to(out.dtype.element_ty), mask=dim < L)
            if lse_out is not None:
                lse = tl.where(l_i == 0, -float("inf"), m_i / log_base(PRECISION) + tl.log2(l_i) * LN2)
                tl.store(lse_out + token * sl_t + head, lse, mask=tl.program_id(2) == 0)


_launch = Launcher(_mla_decode_kernel, VARYING)
_launch_merge = Launcher(_merge_kernel, VARYING)


def launch(config: MLADecodeConfig, inputs: AttentionInputs, workspace: torch.Tensor | None) -> None:
    """The launch over all keys, and where programs share items, the one that adds up their states.

    inputs: one KV head, values a view of the keys. workspace: int32 [config.workspace] or more, its first 3 * COUNTERS
    elements zero, as they are afterwards; nothing else may use it before the launches are done.
    """
    query, key, table, out, lse = inputs.query, inputs.key, inputs.block_table, inputs.out, inputs.lse
    num_seqs, tuning = len(inputs.seq_lens), config.tuning
    splits, states, _ = config.places(workspace)
    codes, scales, halves = key, None, None
    if key.dtype == torch.uint8:
        codes, scales, halves = views(key)
        codes = codes.view(torch.float8_e4m3fn)
    arguments = (
        *(query, codes, scales, halves, out, lse, table),
        *(inputs.query_start_loc, inputs.seq_lens, inputs.k_scale, splits, states),
        *(num_seqs, len(key), key.shape[1] * table.shape[1], config.max_tokens),
        *(inputs.scale, inputs.out_scale, inputs.softcap),
        *(*query.stride()[:2], *key.stride()[:2], *_result_strides(inputs), table.stride(0)),
    )
    rope = query.shape[2] - out.shape[2]
    constants = {
        **_shared_constants(config, inputs),
        "S": key.shape[1],
        "R": rope,
        "BLOCK_R": max(16, triton.next_power_of_2(rope)),
        "BLOCK_N": tuning.block_n,
        "TILE_OVERHEAD": tuning.tile_overhead,
        "CHUNK": 32 if num_seqs <= 32 else 256,
        "MASK": tuple(inputs.mask),
        "SOFTCAP": inputs.softcap > 0,
        "E4M3": codes.dtype == torch.float8_e4m3fn,
    }
    with on_device(query):
        stages = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        _launch((config.programs,), arguments, constants, **stages, **pdl_option(config.supports_pdl))
        merge(config, inputs, splits, states)


def merge(
    config: MLADecodeConfig, inputs: AttentionInputs, splits: torch.Tensor | None, states: torch.Tensor | None
) -> None:
    """The launch that adds up the states of items that programs share, where they do."""
    if splits is None or config.merge is None:
        return
    query, lse, count = inputs.query, inputs.lse, len(inputs.seq_lens)
    arguments = (splits, states, inputs.out, lse, inputs.query_start_loc, count, config.max_tokens)
    unroll, dims, some = config.merge
    constants = _shared_constants(config, inputs) | {"UNROLL": unroll, "DIMS": dims, "SOME": some}
    grid = (len(query), config.parts * -(-config.heads // some), constants["BLOCK_L"] // dims)
    _launch_merge(
        grid, (*arguments, *_result_strides(inputs)), constants, num_warps=4, **pdl_option(config.supports_pdl)
    )


def _result_strides(inputs: AttentionInputs) -> tuple[int, int, int]:
    return *inputs.out.stride()[:2], 0 if inputs.lse is None else inputs.lse.stride(0)


def _shared_constants(config: MLADecodeConfig, inputs: AttentionInputs) -> dict[str, Any]:
    latent = inputs.out.shape[2]
    return {
        "HEADS": inputs.query.shape[1],
        "G": config.heads,
        "PARTS": config.parts,
        "L": latent,
        "BLOCK_L": max(16, triton.next_power_of_2(latent)),
        "BLOCK_M": config.block_m,
        "PDL": config.supports_pdl,
        "PRECISION": "ieee" if inputs.query.dtype == torch.float32 else "tf32",
    }
