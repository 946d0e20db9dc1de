"""Triton: queries as e4m3 and the factors that undo it, per sequence and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.fp8.device import fp8_bits
from ...formats.fp8.format import FP8, SMALLEST_MAXIMUM
from ...formats.rounding import saturating_quotient
from ...runtime.device import on_device
from ...runtime.launcher import Launcher

_MOST, _SMALLEST = tl.constexpr(FP8[torch.float8_e4m3fn]), tl.constexpr(SMALLEST_MAXIMUM)
_TILE = 4096  # elements
_ROWS_OF_PART = 256  # rows of a query head; below, one program per sequence and KV head and one launch are fastest
_MOST_PARTS = 64


@triton.jit
def _rows_of(query, query_start_loc, seq, kv_head, first, s_t, s_h, G: tl.constexpr, D: tl.constexpr,
             ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Query heads `first` and on of a sequence's tokens, G of each: [ROWS, BLOCK_D] float32, with their places."""
    start = tl.load(query_start_loc + seq)
    row = first + tl.arange(0, ROWS)  # [ROWS]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    token, head = (start + row // G).to(tl.int64), kv_head * G + row % G
    there = (row < (tl.load(query_start_loc + seq + 1) - start) * G)[:, None] & (dim < D)[None, :]
    x = tl.load(query + (token * s_t + head * s_h)[:, None] + dim[None, :], mask=there, other=0.0)
    return x.to(tl.float32), token, head, there


@triton.jit
def _largest_of(query, query_start_loc, seq, kv_head, part, s_t, s_h, PARTS: tl.constexpr, G: tl.constexpr,
                D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The largest magnitude of a part of a sequence's rows, 0 where it has none."""
    rows = (tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)) * G
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(part * ROWS, rows, PARTS * ROWS):
        x, _, _, _ = _rows_of(query, query_start_loc, seq, kv_head, first, s_t, s_h, G, D, ROWS, BLOCK_D)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    return tl.max(largest, 0)


@triton.jit
def _largest_kernel(
    query, query_start_loc, partial, s_t, s_h, PARTS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of each part of a sequence's rows; partial [B, Hkv, PARTS]."""
    seq, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    largest = _largest_of(query, query_start_loc, seq, kv_head, part, s_t, s_h, PARTS, G, D, ROWS, BLOCK_D)
    tl.store(partial + (seq * tl.num_programs(1) + kv_head) * PARTS + part, largest)


@triton.jit
def _quantise_kernel(
    query, query_start_loc, partial, codes, descales, k_scale, v_scale, s_t, s_h, PARTS: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """codes [T, Hq, D] uint8, contiguous; descales [3, B, Hkv]."""
    seq, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    at = seq * kv_heads + kv_head
    if PARTS == 1:
        largest = _largest_of(query, query_start_loc, seq, kv_head, part, s_t, s_h, PARTS, G, D, ROWS, BLOCK_D)
    else:
        largest = tl.max(tl.load(partial + at * PARTS + tl.arange(0, PARTS)), 0)
    scale = tl.where(largest < _SMALLEST, 1.0, tl.div_rn(largest, _MOST))  # with a scale of 1 codes are 0
    if part == 0:
        every = tl.num_programs(0) * kv_heads
        tl.store(descales + at, scale)
        tl.store(descales + every + at, k_scale)
        tl.store(descales + 2 * every + at, v_scale)
    rows = (tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)) * G
    for first in range(part * ROWS, rows, PARTS * ROWS):
        x, token, head, there = _rows_of(query, query_start_loc, seq, kv_head, first, s_t, s_h, G, D, ROWS, BLOCK_D)
        x = fp8_bits(saturating_quotient(x, scale), 3, 7)
        place = codes + ((token * kv_heads * G + head) * D)[:, None] + tl.arange(0, BLOCK_D)[None, :]
        tl.store(place, x, mask=there)


_launch_largest, _launch_quantise = Launcher(_largest_kernel), Launcher(_quantise_kernel)


def launch(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    codes: torch.Tensor,
    descales: torch.Tensor,
    max_query_len: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """One launch for short queries, two for long ones, whose rows are shared out.

    Args:
        query: [T, Hq, D], last dimension contiguous. query_start_loc: [B + 1] int32. max_query_len: an upper bound.
        codes: [T, Hq, D] float8_e4m3fn, contiguous; rows past the last sequence are left as they are.
        descales: [3, B, Hkv] float32, contiguous: of queries, and in the other two k_scale and v_scale.
    """
    (_, heads, dim), (_, num_seqs, kv_heads) = query.shape, descales.shape
    group, width = heads // kv_heads, triton.next_power_of_2(dim)
    parts = min(triton.next_power_of_2(max(max_query_len * group // _ROWS_OF_PART, 1)), _MOST_PARTS)
    rows = min(max(triton.next_power_of_2(max_query_len * group), 1), _TILE // width)
    constants = {"PARTS": parts, "G": group, "D": dim, "ROWS": rows, "BLOCK_D": width}
    partial = None if parts == 1 else descales.new_empty(num_seqs, kv_heads, parts)
    grid, strides = (num_seqs, kv_heads, parts), query.stride()[:2]
    with on_device(query):
        if partial is not None:
            _launch_largest(grid, (query, query_start_loc, partial, *strides), constants, num_warps=4)
        given = (query, query_start_loc, partial, codes.view(torch.uint8), descales, float(k_scale), float(v_scale))
        _launch_quantise(grid, (*given, *strides), constants, num_warps=4)
