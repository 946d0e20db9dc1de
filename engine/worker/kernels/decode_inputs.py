"""Triton kernel that writes what a captured step of decodes reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ...pdl import PDLKernel, pdl_wait

if TYPE_CHECKING:
    from pagedattn import CommonAttentionMetadata

_COLUMNS = 128


@triton.jit(do_not_specialize=["count", "group", "width"])
def _write_kernel(
    sent,
    tables,
    last_tokens,
    ids,
    positions,
    state_rows,
    lengths,
    starts,
    seq_lens,
    table_out,
    count,
    group,
    width,
    stride_sent,
    stride_table,
    stride_out,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r: row r of the batch, its table included."""
    pdl_wait(PDL)
    at = tl.program_id(0)
    live = at < count
    row = tl.load(sent + at)
    token = tl.load(sent + stride_sent + at)
    position = tl.load(sent + 2 * stride_sent + at)
    block = tl.load(sent + (3 + group) * stride_sent + at)
    if group == 0:
        tl.store(ids + at, tl.where(token < 0, tl.maximum(tl.load(last_tokens + row), 0), token))
        tl.store(positions + at, position)
        tl.store(state_rows + at, row)
        tl.store(lengths + at, position + 1)
    tl.store(starts + at, tl.minimum(at, count))
    tl.store(starts + at + 1, tl.minimum(at + 1, count))
    tl.store(seq_lens + at, tl.where(live, position + 1, 0))
    if live:
        column = position // SIZE
        table = tables + row.to(tl.int64) * stride_table
        tl.store(table + column, block)
        for first in range(0, tl.minimum(column + 1, width), COLUMNS):
            index = first + tl.arange(0, COLUMNS)  # [COLUMNS]
            before = tl.load(table + index, mask=index < column, other=0)
            inside = (index <= column) & (index < width)
            tl.store(table_out + at.to(tl.int64) * stride_out + index, tl.where(index < column, before, block), inside)


_write = PDLKernel(_write_kernel)


def write(
    sent: torch.Tensor,
    group: int,
    count: int,
    table: torch.Tensor,
    block_size: int,
    last_tokens: torch.Tensor,
    rows: Sequence[torch.Tensor],
    common: CommonAttentionMetadata,
    out: torch.Tensor,
) -> None:
    """As `decode_inputs.write_decodes`, of one KV group, to whose table `out`; the rows themselves with the first."""
    arguments = (
        *(sent, table, last_tokens, *rows, common.query_start_loc, common.seq_lens, out),
        *(count, group, out.shape[1], sent.stride(0), table.stride(0), out.stride(0)),
    )
    _write((sent.shape[1],), arguments, {"SIZE": block_size, "COLUMNS": _COLUMNS}, num_warps=1)
