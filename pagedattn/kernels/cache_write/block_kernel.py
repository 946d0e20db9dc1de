"""Triton: encode the blocks that a step's tokens filled, a KV head's keys and values by some programs each.

Formats that encode each row alone store a block's rows as they store new tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.base import CacheFormat, plane_strides
from ...runtime.device import on_device
from ...runtime.launcher import Launcher


@triton.constexpr_function
def _rows_at_once(size, dim):
    """Of a block of `size`, which they divide: 1,024 elements at most, as programs encode parts side by side."""
    most = max(1, 1024 // triton.next_power_of_2(dim))
    return next(count for count in range(min(size, most), 0, -1) if size % count == 0)


@triton.jit
def _write_block(
    rows, codes, scales, source, block, head, part, s_b, s_rows, s_h, sc_b, s_codes, sc_h,
    SCALE_STRIDES: tl.constexpr, FORMAT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A part of the S rows that a KV head has in block `source` of the second cache, to `block` of the first one."""
    rows += source * s_b + head * s_h
    codes += block * sc_b + head * sc_h
    scales += block * SCALE_STRIDES[0] + head * SCALE_STRIDES[2]
    if FORMAT.write_block is not None:
        FORMAT.write_block(rows, codes, scales, s_rows, s_codes, SCALE_STRIDES[1], part, S, D, PARTS)
    else:
        ROWS: tl.constexpr = _rows_at_once(S, D)
        index = tl.arange(0, triton.next_power_of_2(ROWS)).to(tl.int64)
        for first in range(part * ROWS, S, PARTS * ROWS):
            slot = first + index
            FORMAT.write_rows(
                rows, codes, scales, None, 1.0, slot * s_rows, slot * s_codes, slot * SCALE_STRIDES[1], index,
                index < ROWS, index < ROWS, D, 0,
            )  # fmt: skip


@triton.jit
def _filled_blocks(query_start_loc, seq_lens, seq, num_seqs, max_columns, S: tl.constexpr, RECENT: tl.constexpr):
    """Of sequences `seq`: the first column that the step fills, and how many it fills."""
    inside = seq < num_seqs
    seq_len = tl.load(seq_lens + seq, mask=inside, other=0)
    start = tl.load(query_start_loc + seq, mask=inside, other=0)
    new = tl.load(query_start_loc + seq + 1, mask=inside, other=0) - start
    column = tl.maximum(tl.maximum(seq_len - new, 0) // S - RECENT, 0)
    return column, tl.maximum(tl.minimum(seq_len // S - RECENT, max_columns) - column, 0)


@triton.jit(do_not_specialize=["num_seqs", "num_recent", "num_blocks", "max_columns", "s_recent_table", "s_table"])
def _seal_blocks_kernel(
    key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, recent_table, table, query_start_loc, seq_lens,
    num_seqs, num_recent, num_blocks, max_columns, s_recent_table, s_table, layers, sk_l, sk_b, sk_s, sk_h, sv_l, sv_b,
    sv_s, sv_h, sck_l, sck_b, sck_s, sck_h, scv_l, scv_b, scv_s, scv_h, ssk_l, ssv_l, SEQS: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_SCALE_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr, PARTS: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Of one layer and all blocks that the step fills, in the order of sequences, every num_programs(0) / layers th; KV
    head program_id(1); program_id(2): a part of the keys or of the values. RECENT full blocks stay as they are. Few
    steps of decodes fill more than a few blocks, so that a program for each sequence would have nothing to do."""
    layer = (tl.program_id(0) % layers).to(tl.int64)
    key += layer * sk_l
    value += layer * sv_l
    key_cache += layer * sck_l
    value_cache += layer * scv_l
    k_scale_cache += layer * ssk_l
    v_scale_cache += layer * ssv_l
    item = tl.program_id(0) // layers
    part = tl.program_id(2) % PARTS
    head = tl.program_id(1).to(tl.int64)
    before = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        columns, count = _filled_blocks(query_start_loc, seq_lens, seqs, num_seqs, max_columns, S, RECENT)
        end = before + tl.cumsum(count, 0)
        before += tl.sum(count, 0)
        while item < before:
            mine = (item < end) & (item >= end - count)
            seq = tl.sum(tl.where(mine, seqs, 0), 0).to(tl.int64)
            column = tl.sum(tl.where(mine, columns + item - (end - count), 0), 0)
            source = tl.load(recent_table + seq * s_recent_table + column).to(tl.int64)
            block = tl.load(table + seq * s_table + column).to(tl.int64)
            if (source >= 0) & (source < num_recent) & (block >= 0) & (block < num_blocks):
                if tl.program_id(2) < PARTS:
                    _write_block(
                        key, key_cache, k_scale_cache, source, block, head, part, sk_b, sk_s, sk_h, sck_b, sck_s, sck_h,
                        K_SCALE_STRIDES, K_FORMAT, S, D, PARTS,
                    )  # fmt: skip
                else:
                    _write_block(
                        value, value_cache, v_scale_cache, source, block, head, part, sv_b, sv_s, sv_h, scv_b, scv_s,
                        scv_h, V_SCALE_STRIDES, V_FORMAT, S, DV, PARTS,
                    )  # fmt: skip
            item += tl.num_programs(0) // layers


_SEQS = 256  # whose lengths a program reads at once
_PARTS = 4  # of a head's keys, and of its values: more and smaller programs wait for less
_PROGRAMS = 2048  # at most, which is as many as GPUs run at once
_MAX_REGISTERS = 128  # a thread, for 8 programs an SM; nothing spills
_launch = Launcher(_seal_blocks_kernel, ("key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache"))


def launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
    recent_table: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    columns: int,
    form: CacheFormat,
) -> None:
    """Shapes as in `seal_blocks`, of layers; columns: the most blocks that a sequence's new tokens fill."""
    layers, num_recent, size, heads = key.shape[:4]
    arguments = (
        *(key, value, key_cache, value_cache, k_scale_cache, v_scale_cache),
        *(recent_table, block_table, query_start_loc, seq_lens),
        *(len(seq_lens), num_recent, key_cache.shape[1], min(recent_table.shape[1], block_table.shape[1])),
        *(recent_table.stride(0), block_table.stride(0), layers),
        *(*key.stride()[:4], *value.stride()[:4], *key_cache.stride()[:4], *value_cache.stride()[:4]),
        *(k_scale_cache.stride(0), v_scale_cache.stride(0)),
    )
    constants = {
        "SEQS": _SEQS,
        "S": size,
        "D": key.shape[4],
        "DV": value.shape[4],
        "K_FORMAT": form.key.kernels,
        "V_FORMAT": form.value.kernels,
        "K_SCALE_STRIDES": plane_strides(k_scale_cache[0]),
        "V_SCALE_STRIDES": plane_strides(v_scale_cache[0]),
        "PARTS": _PARTS,
        "RECENT": form.recent_blocks(size),
    }
    with on_device(key):
        programs = min(len(seq_lens) * columns, max(1, _PROGRAMS // (2 * _PARTS * heads * layers)))
        grid = (programs * layers, heads, 2 * _PARTS)
        _launch(grid, arguments, constants, num_warps=2, maxnreg=_MAX_REGISTERS)
