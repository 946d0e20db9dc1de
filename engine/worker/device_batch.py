"""DeviceBatch: what one step feeds the model, sent in one transfer.

Slots, tables, and tokens that the host has not read are made on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedattn import CommonAttentionMetadata, ops

from ..sampling.rows import SampledRows
from ..transfer import transfer
from .host_batch import HostBatch
from .persistent_batch import PersistentBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Device tensors of one step of T tokens."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    sampled: torch.Tensor  # [n] int32, rows of the T whose next token is sampled
    rows: SampledRows
    common_by_group: dict[int, CommonAttentionMetadata]  # by KV group


class BatchSender:
    """Sends packed steps to the device that has `state`."""

    def __init__(self, state: PersistentBatch, device: torch.device) -> None:
        self._state, self._device = state, device

    def send(self, packed: HostBatch) -> DeviceBatch:
        """A packed step on the device, in one transfer."""
        state, updates, ends, rows, sampled = self._state, packed.updates, packed.ends, packed.rows, packed.sampled
        counts, tokens = ends - packed.starts, packed.tokens
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        counts.cumsum(out=query_start_loc[1:])
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(ends - query_start_loc[1:], counts)
        last = query_start_loc[1:][sampled] - 1
        sent = (tokens, positions, query_start_loc, ends, rows, last, rows[sampled], ends[sampled], *updates.parts)
        parts = transfer(sent, self._device)
        ids, positions_dev, starts_dev, seq_lens, rows_dev, last_dev, sampled_rows, lengths, *changed = parts
        state.apply(*changed)
        if (tokens[: packed.num_decodes] < 0).any():
            ids = _known(ids, packed.num_decodes, state.last_tokens, rows_dev)
        # Each group's slots on an aligned start, without which layers do not repeat their launches.
        slots = torch.empty(len(state.block_sizes), -(-len(tokens) // 2) * 2, dtype=torch.int64, device=self._device)
        common = CommonAttentionMetadata(
            query_start_loc=starts_dev,
            seq_lens=seq_lens,
            block_table=state.tables[0, :0],
            slot_mapping=slots[:, : len(tokens)],
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens_cpu=torch.from_numpy(ends),
            num_seqs=len(rows),
            num_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            num_decodes=packed.num_decodes,
        )
        common_by_group = self._by_group(common, rows_dev, packed.shared)
        last_tokens = ids[:0] if packed.sampling is None else ids.index_select(0, last_dev)
        return DeviceBatch(
            ids, positions_dev, last_dev, SampledRows(last_tokens, sampled_rows, lengths), common_by_group
        )

    def _by_group(
        self, common: CommonAttentionMetadata, rows: torch.Tensor, shared: Sequence[int]
    ) -> dict[int, CommonAttentionMetadata]:
        """The step's metadata of every group, slots and tables made on the device; `common` has room for the slots."""
        tables, slots, sizes = self._state.tables, common.slot_mapping, self._state.block_sizes
        starts, lens = common.query_start_loc, common.seq_lens
        ops.compute_slot_mapping(tables, sizes, starts, lens, slots, rows=rows)
        widest = -(-common.max_seq_len // min(sizes))
        table = tables[:, :, :widest].index_select(1, rows)
        recent = table[-1] if len(table) > self._state.num_layer_groups else None
        return {
            group: common.replace(
                block_table=table[group],
                slot_mapping=slots[group],
                shared_prefix_len=length,
                block_size=sizes[group],
                recent_table=recent,
            )
            for group, length in enumerate(shared)
        }


def _known(ids: torch.Tensor, num_decodes: int, last_tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Input ids whose negative ones are the last tokens of their rows, which the host has not read yet.

    A row whose last token was not drawn (no finite logit) ends before the result of this step is looked at.
    """
    own = last_tokens.index_select(0, rows[:num_decodes]).clamp_(min=0)
    ids[:num_decodes] = torch.where(ids[:num_decodes] < 0, own, ids[:num_decodes])
    return ids
