"""What FlashInfer reads of a step: offsets and lengths on the host, page numbers on the device."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch

from ...errors import InvalidInputError
from ...kernels.packing import offsets
from ...step.metadata import CommonAttentionMetadata

_log = logging.getLogger("pagedattn")


class Lengths(NamedTuple):
    """Query rows and keys per sequence, both [B] int32 on the host."""

    queries: torch.Tensor
    keys: torch.Tensor


class Pages(NamedTuple):
    """A paged batch of N sequences as FlashInfer plans it; all int32, all on the host but `indices`."""

    query_start_loc: torch.Tensor  # [N + 1]
    indptr: torch.Tensor  # [N + 1] where each sequence's pages begin in `indices`
    indices: torch.Tensor  # [indptr[-1]] on the device
    last_page_len: torch.Tensor  # [N] in 1..block_size
    seq_lens: torch.Tensor  # [N] keys on those pages; FlashInfer would take a sequence without pages for one of a page


def host_lengths(common: CommonAttentionMetadata) -> Lengths:
    """The lengths of a step; copied from the device, which waits for it, only where the host does not know them."""
    starts, keys, count = common.query_start_loc_cpu, common.seq_lens_cpu, common.num_seqs
    if starts is None or keys is None:
        _say_that_a_build_waits()
        starts = common.query_start_loc.cpu() if starts is None else starts
        keys = common.seq_lens.cpu() if keys is None else keys
    return Lengths(starts[: count + 1].diff().int(), keys[:count].int())


@cache
def _say_that_a_build_waits() -> None:
    _log.info(
        "FLASHINFER plans with lengths on the host; query_start_loc_cpu or seq_lens_cpu is None, so that every build "
        "copies them from the device and waits for it"
    )


def leading_single_tokens(queries: torch.Tensor) -> int:
    """How many sequences in front have exactly one query row, so that sequence b is row b."""
    return int((queries == 1).int().cumprod(0).sum())


def without_surplus(lengths: Lengths) -> tuple[Lengths, torch.Tensor]:
    """Causal sequences with more queries than keys, each cut into one without keys and one as long as its keys.

    FlashInfer's kernels are right on either, but let rows attend that stand before the first key, and its fa2 kernel
    then skips the mask of later rows. Returns lengths [N], and the sequence each came from [N].
    """
    queries, keys = lengths
    surplus = (queries - keys).clamp_min(0)
    rows = torch.arange(len(queries), device=queries.device)
    if not bool(surplus.any()):
        return lengths, rows
    queries = torch.stack((surplus, queries - surplus), 1).flatten()
    keys = torch.stack((torch.zeros_like(keys), keys), 1).flatten()
    return Lengths(queries, keys), rows.repeat_interleave(2)


def page_lists(
    lengths: Lengths, block_table: torch.Tensor, block_size: int, *, cut_surplus: bool, window: int | None
) -> Pages:
    """The pages that queries read: none for a sequence without queries, and none wholly before its first window.

    Args:
        lengths: of the B sequences whose rows of `block_table` [B, max_blocks] these are.
        cut_surplus: apply `without_surplus`.
        window: keys that a causal query sees, its own included; None is all.

    Raises:
        InvalidInputError: a sequence is longer than its row of the table.
    """
    rows = torch.arange(len(lengths.queries), device=lengths.queries.device)
    if cut_surplus:
        lengths, rows = without_surplus(lengths)
    queries, keys = lengths
    keys = torch.where(queries > 0, keys, 0)
    skipped = torch.zeros_like(keys)
    if window is not None:
        skipped = (keys - queries - window + 1).clamp_min(0) // block_size
        keys = keys - skipped * block_size
    counts = (keys + block_size - 1) // block_size
    width = block_table.shape[1]
    longest = int((skipped + counts).max()) if len(counts) else 0
    if longest > width:
        raise InvalidInputError("block_table", f"at least {longest} blocks wide, as seq_lens say", width)
    return Pages(
        query_start_loc=offsets(queries),
        indptr=offsets(counts),
        indices=_gather(block_table, rows, skipped, counts),
        last_page_len=(keys - 1) % block_size + 1,
        seq_lens=keys,
    )


def _gather(table: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """table[rows[i], first[i] : first[i] + counts[i]] of all i, packed; the host waits for nothing."""
    counts = counts.long()
    total = int(counts.sum())
    # Entry number e of the result, which is of sequence i, is at e + shift[i] of the flat table.
    shift = rows * table.shape[1] + first - (counts.cumsum(0) - counts)
    repeats, shift = torch.stack((counts, shift)).to(table.device, non_blocking=True)
    position = torch.arange(total, device=table.device)
    return table.take(shift.repeat_interleave(repeats, output_size=total) + position)
