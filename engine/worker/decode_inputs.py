"""What a captured step of decodes reads, written on the device: by a Triton kernel on a GPU, by torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedattn import CommonAttentionMetadata

from ..sampling.rows import SampledRows
from ..transfer import pinned
from .host_batch import HostBatch
from .persistent_batch import PersistentBatch


class DecodeRows(NamedTuple):
    """What a model and the sampler read of `size` rows, those behind a step's own being padding; all [size] int32."""

    ids: torch.Tensor
    positions: torch.Tensor
    state_rows: torch.Tensor
    lengths: torch.Tensor

    def first(self, size: int) -> DecodeRows:
        """The first `size` rows."""
        return DecodeRows(*(rows[:size] for rows in self))

    def sampled(self, count: int) -> SampledRows:
        """The first `count` rows, all sampled: a decode's input is its last token."""
        return SampledRows(self.ids[:count], self.state_rows[:count], self.lengths[:count])


def packed_decodes(packed: HostBatch, size: int, padding_row: int, device: torch.device) -> torch.Tensor:
    """A step of decodes, padded to `size` rows, in one transfer: [3 + groups, size] int32 on the device.

    State row, token (negative: not read by the host), position, and by group the block that the token goes to. Padding
    has state row `padding_row`, and zeros.
    """
    count, groups = len(packed.rows), len(packed.updates.current)
    host = pinned((3 + groups, size), device)
    target: np.ndarray = host.numpy()
    target[:, count:] = 0
    target[0, count:] = padding_row
    target[0, :count], target[1, :count], target[2, :count] = packed.rows, packed.tokens, packed.starts
    target[3:, :count] = packed.updates.current
    return host.to(device, non_blocking=True)


def write_decodes(
    sent: torch.Tensor,
    count: int,
    state: PersistentBatch,
    rows: DecodeRows,
    common_by_group: Sequence[CommonAttentionMetadata],
) -> None:
    """Put each new block into the state's tables, and the step into `rows` and `common_by_group`.

    Args:
        sent: [3 + groups, size], what `packed_decodes` made. count: of its rows, those that are no padding.
        rows: tensors [size] to write to.
        common_by_group: the tensors of captured metadata for `size` sequences; padding gets neither tokens nor keys.
            Slots are the captured step's own to compute.
    """
    if sent.is_cuda:
        from .kernels.decode_inputs import write

        for group, (common, out) in enumerate(tables_of(common_by_group)):
            table, size = state.tables[group], state.block_sizes[group]
            write(sent, group, count, table, size, state.last_tokens, rows, common, out)
        return
    state_rows, ids, positions, *blocks = sent
    rows.state_rows.copy_(state_rows)
    rows.ids.copy_(torch.where(ids < 0, state.last_tokens[state_rows].clamp(min=0), ids))
    rows.positions.copy_(positions)
    rows.lengths.copy_(positions + 1)
    live = torch.arange(len(ids), device=ids.device) < count
    every = zip(state.tables, state.block_sizes, blocks, tables_of(common_by_group), strict=True)
    for table, size, block, (common, out) in every:
        column = positions // size
        table[state_rows[:count], column[:count]] = block[:count]
        width = min(out.shape[1], table.shape[1])
        out[:count, :width] = table[state_rows[:count], :width]
        common.query_start_loc.copy_(torch.arange(len(ids) + 1).clamp(max=count))
        common.seq_lens.copy_(torch.where(live, positions + 1, 0))


def tables_of(common_by_group: Sequence[CommonAttentionMetadata]) -> list[tuple[CommonAttentionMetadata, torch.Tensor]]:
    """The metadata and the table to write for each group of the state, that of blocks that are not full last."""
    tables = [(common, common.block_table) for common in common_by_group]
    return tables + [(one, one.recent_table) for one in common_by_group if one.recent_table is not None]
