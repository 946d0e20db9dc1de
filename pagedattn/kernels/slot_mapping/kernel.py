"""Triton: slot of every new token, all KV groups in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher

_TOKENS = 256


@triton.jit(do_not_specialize=["num_seqs", "num_slots", "max_blocks", "stride_group", "stride_row"])
def _slot_mapping_kernel(
    tables, query_start_loc, seq_lens, slots, rows, num_seqs, num_slots, max_blocks, stride_group, stride_row,
    stride_slots, SIZES: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program b fills sequence b's slots; the last program fills the tail of the buffer."""
    seq = tl.program_id(0)
    tail = seq == num_seqs
    start = tl.load(query_start_loc + seq)
    end = num_slots
    shift = 0
    row = 0
    if not tail:
        end = tl.minimum(tl.load(query_start_loc + seq + 1), num_slots)
        shift = tl.load(seq_lens + seq) - tl.load(query_start_loc + seq + 1)
        row = tl.load(rows + seq) if rows is not None else seq
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)  # [TOKENS]
        position = token + shift
        for group in tl.static_range(GROUPS):
            size = SIZES[group]
            column = position // (size * WORLD)
            rest = position % (size * WORLD)
            live = (token < end) & (position >= 0) & (column < max_blocks) & ((rest // INTERLEAVE) % WORLD == RANK)
            live = live & (not tail)
            offset = rest // (WORLD * INTERLEAVE) * INTERLEAVE + rest % INTERLEAVE
            entry = tables + group * tl.cast(stride_group, tl.int64) + row * tl.cast(stride_row, tl.int64) + column
            block = tl.load(entry, mask=live, other=0).to(tl.int64)
            slot = tl.where(live, block * size + offset, -1)
            tl.store(slots + group * tl.cast(stride_slots, tl.int64) + token, slot, mask=token < end)


_launch = Launcher(_slot_mapping_kernel)


def launch(
    tables: torch.Tensor,
    sizes: list[int],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
    world: int,
    rank: int,
    interleave: int,
) -> None:
    """One program per sequence and one for the tail."""
    sizes_and_strides = (len(seq_lens), slots.shape[1], tables.shape[2], *tables.stride()[:2], slots.stride(0))
    constants = {
        "SIZES": tuple(sizes),
        "GROUPS": len(sizes),
        "WORLD": world,
        "RANK": rank,
        "INTERLEAVE": interleave,
        "TOKENS": _TOKENS,
    }
    with on_device(slots):
        arguments = (tables, query_start_loc, seq_lens, slots, rows, *sizes_and_strides)
        _launch((len(seq_lens) + 1,), arguments, constants)
