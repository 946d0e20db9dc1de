"""Checks of a step's metadata against what the host knows of it, none of which waits for the device."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import InvalidInputError
from .metadata import CommonAttentionMetadata, not_decodes


def check_bounds(common: CommonAttentionMetadata) -> None:
    """Raise InvalidInputError where what the host knows of a step does not agree: a kernel that is given too small a
    bound may never end."""
    starts, lens, count = common.query_start_loc_cpu, common.seq_lens_cpu, common.num_seqs
    if not 0 <= common.num_decodes <= count:
        raise InvalidInputError("num_decodes", f"in 0..{count}, the number of sequences", common.num_decodes)
    for name, tensor, rows in (("query_start_loc_cpu", starts, count + 1), ("seq_lens_cpu", lens, count)):
        if tensor is not None and tensor.shape != (rows,):
            raise InvalidInputError(name, f"[{rows}] for {count} sequences, or None", list(tensor.shape))
    if common.seq_lens.shape[0] < count:
        raise InvalidInputError("num_seqs", f"at most {len(common.seq_lens)}, the length of seq_lens", count)
    first = None if starts is None else starts.numpy()  # whose operations cost a third of torch's
    if first is not None and (end := first[-1]) > common.num_tokens:
        raise InvalidInputError("num_tokens", f"at least {end}, where the queries end", common.num_tokens)
    check_lengths_within_bounds(common, first, None if lens is None else lens.numpy())


def check_lengths_within_bounds(
    common: CommonAttentionMetadata, starts: np.ndarray | None, seq_lens: np.ndarray | None
) -> None:
    """Starts [B + 1] and lengths [B], None where unknown, are as the metadata's integers say."""
    if seq_lens is not None and len(seq_lens):
        _at_most("max_seq_len", common.max_seq_len, int(seq_lens.max()))
    if starts is None or len(starts) == 1:
        return
    decodes, query_lens = common.num_decodes, starts[1:] - starts[:-1]
    longest = int(query_lens.max())
    _at_most("max_query_len", common.max_query_len, longest)
    # The padding of a captured batch decodes nothing; before sequences that are no decodes there is none.
    single = longest <= 1 or not decodes or query_lens[:decodes].max() <= 1
    if not single or (decodes < common.num_seqs and starts[decodes] != decodes):
        raise not_decodes(query_lens.tolist(), decodes)


def _at_most(name: str, bound: int, longest: int) -> None:
    if longest > bound:
        raise InvalidInputError(name, f"at least {longest}, the longest", bound)


def check_lengths_fit_table(common: CommonAttentionMetadata, seq_lens: torch.Tensor, block_size: int) -> None:
    """Lengths [B] on the host name no key beyond the block table, and a shared prefix lies within them."""
    _check_width(common.block_table, "the table's width", seq_lens, block_size)
    if common.shared_prefix_len:
        check_shared_length(common, seq_lens)


def check_lengths_fit_recent_table(common: CommonAttentionMetadata, seq_lens: torch.Tensor, block_size: int) -> None:
    """The same of the second cache's table: what lies beyond its columns is neither written nor read."""
    if common.recent_table is not None:
        _check_width(common.recent_table, "the width of recent_table", seq_lens, block_size)


def _check_width(table: torch.Tensor, width: str, seq_lens: torch.Tensor, block_size: int) -> None:
    room, longest = table.shape[1] * block_size, int(seq_lens.max()) if len(seq_lens) else 0
    if longest > room:
        raise InvalidInputError("seq_lens", f"at most {room}, {width} x block size", longest)


def check_shared_length(common: CommonAttentionMetadata, seq_lens: torch.Tensor) -> None:
    """A prefix is no longer than the shortest sequence, padding aside; the first sequence's row says where it lies."""
    most = int(seq_lens[seq_lens > 0].min()) if len(seq_lens) and seq_lens[0] > 0 else 0
    if not 0 <= common.shared_prefix_len <= most:
        expected = f"in 0..{most}, what the shortest sequence has"
        raise InvalidInputError("shared_prefix_len", expected, common.shared_prefix_len)
