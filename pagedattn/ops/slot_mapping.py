"""compute_slot_mapping: where each new token's key and value go, for every KV group in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.op_registry import choose, expect, load, register


def compute_slot_mapping(
    block_tables: torch.Tensor,
    block_sizes: int | Sequence[int],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    world: int = 1,
    rank: int = 0,
    interleave: int = 1,
    path: str = "auto",
) -> None:
    """Fill `slot_mapping` with slot = block * block_size + offset for every new token of a step.

    Token t of sequence b sits at position seq_lens[b] - query_len[b] + (t - query_start_loc[b]). With context parallel
    ranks a virtual block holds block_size * world positions in runs of `interleave`, and other ranks' tokens get -1.
    So do positions past the table, and the tail of the buffer past query_start_loc[B].

    Args:
        block_tables: [R, max_blocks] or, for G groups, [G, R, max_blocks] int32.
        block_sizes: tokens per block, one per group.
        query_start_loc: [B + 1] int32. seq_lens: [B] int32, new tokens included.
        slot_mapping: [N] or [G, N] int64, written in full.
        rows: [B] int32, the table row of each sequence; row b where None.

    Raises:
        InvalidInputError: wrong rank, dtype, length, stride or number of groups.
    """
    tables = block_tables.unsqueeze(0) if block_tables.dim() == 2 else block_tables
    slots = slot_mapping.unsqueeze(0) if slot_mapping.dim() == 1 else slot_mapping
    sizes = [block_sizes] if isinstance(block_sizes, int) else list(block_sizes)
    expect(tables.dim() == 3 and tables.dtype == torch.int32, "block_tables", "int32 [G, R, max_blocks]", block_tables)
    expect(len(sizes) == len(tables), "block_tables", f"one table per block size ({len(sizes)})", block_tables)
    same = slots.dim() == 2 and slots.dtype == torch.int64 and len(slots) == len(tables) and slots.stride(1) == 1
    expect(same, "slot_mapping", f"int64 [{len(tables)}, N], contiguous rows", slot_mapping)
    rows_fit = tables.stride(2) == 1 or tables.shape[2] < 2
    expect(rows_fit, "block_tables", "contiguous in each row", block_tables)
    count = len(seq_lens)
    for name, tensor, size in (("query_start_loc", query_start_loc, count + 1), ("seq_lens", seq_lens, count)):
        _expect_row(name, tensor, size, slots.device)
    if rows is not None:
        _expect_row("rows", rows, count, slots.device)
    _op(tables, sizes, query_start_loc, seq_lens, slots, rows, world, rank, interleave, path)


def _expect_row(name: str, tensor: torch.Tensor, size: int, device: torch.device) -> None:
    """The kernel reads these without strides."""
    fits = tensor.dtype == torch.int32 and tensor.shape == (size,) and tensor.is_contiguous()
    expect(fits and tensor.device == device, name, f"int32 [{size}] on {device}, contiguous", tensor)


def _run(
    tables: torch.Tensor,
    sizes: list[int],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
    world: int,
    rank: int,
    interleave: int,
    path: str,
) -> None:
    if slots.numel() == 0:
        return
    if len(seq_lens) == 0:
        slots.fill_(-1)
        return
    args = (tables, sizes, query_start_loc, seq_lens, slots, rows, world, rank, interleave)
    if choose(path, slots.device, "compute_slot_mapping") == "triton":
        load("kernels.slot_mapping.kernel").launch(*args)
    else:
        _torch(*args)


def _torch(
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
    token = torch.arange(slots.shape[1], device=slots.device)
    starts = query_start_loc.long()
    seq = torch.searchsorted(starts[1:], token, right=True).clamp_(max=len(seq_lens) - 1)
    position = seq_lens.long()[seq] - starts[seq + 1] + token
    row = seq if rows is None else rows.long()[seq]
    for group, size in enumerate(sizes):
        virtual = size * world
        column, rest = position // virtual, position % virtual
        live = (token < starts[-1]) & (rest // interleave % world == rank) & (position >= 0)
        live &= column < tables.shape[2]
        column = torch.where(live, column, 0)
        offset = rest // (world * interleave) * interleave + rest % interleave
        slot = tables[group, row, column].long() * size + offset if tables.shape[2] else position
        slots[group] = torch.where(live, slot, -1)


def _fake(*args: object) -> None:
    return None


_op = register(
    "compute_slot_mapping(Tensor tables, int[] sizes, Tensor query_start_loc, Tensor seq_lens, Tensor(a!) slots, "
    "Tensor? rows, int world, int rank, int interleave, str path) -> ()",
    _run,
    _fake,
)
