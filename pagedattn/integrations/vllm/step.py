"""vLLM's metadata of a step as the library's, over the same tensors; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import Attention, AttentionMetadata, CommonAttentionMetadata, LayerCache, StepMetadata
from ...errors import UnsupportedError


@dataclass
class StepPlans:
    """The metadata of a step for each kind of layer of one KV group.

    vLLM's wrappers of builders set attributes on what `build` returned (cross attention: `slot_mapping`), or copy its
    fields into a class of their own, so that it is an open dataclass.

    slot_mapping: [n] int64, where new keys and values are written.
    caches: the builder's: by implementation, vLLM's cache and the views of it that were made before. Not kept by the
        implementations, which outlive the small cache that vLLM measures graphs with.
    """

    step: StepMetadata
    slot_mapping: torch.Tensor
    caches: dict[object, tuple[torch.Tensor, LayerCache]]

    def of(self, attention: Attention) -> AttentionMetadata:
        """The metadata for one layer."""
        metadata = self.step.of(attention.plan_key)
        if metadata.common.slot_mapping is not self.slot_mapping:
            metadata.common = metadata.common.replace(slot_mapping=self.slot_mapping)
        return metadata

    def update(self, layers: Iterable[Attention]) -> None:
        """Fill anew what depends on the step's lengths, which are read from tensors that the caller has rewritten."""
        for layer in layers:
            layer.builder.device_update(self.step.of(layer.plan_key))


def graph_key(common: Any) -> tuple[int, ...]:
    """A step's shape and where its tensors lie: a full graph captured under this key can be replayed for it.

    Of captured batches all are uniform, so that a step whose tokens are not sequences x longest finds none.
    """
    uniform = common.num_actual_tokens == common.num_reqs * common.max_query_len
    tensors = (common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping)
    shape = [common.num_reqs, common.num_actual_tokens, common.max_query_len if uniform else -1]
    return tuple(shape + [tensor.data_ptr() for tensor in tensors])


def convert(common: Any, block_size: int, shared_prefix_len: int = 0) -> CommonAttentionMetadata:
    """The library's metadata of vLLM's `CommonAttentionMetadata`.

    Its lengths on the host are bounds where steps overlap, so that they stay out.

    Raises:
        UnsupportedError: causality per sequence.
    """
    if not isinstance(common.causal, bool):
        raise UnsupportedError("causal and other sequences in one batch are not served; start vLLM with FLASH_ATTN")
    count, longest = common.num_reqs, common.max_query_len
    starts, lens, table = common.query_start_loc, common.seq_lens, common.block_table_tensor
    # Mostly they are as long as needed, and a slice costs the host as much as all else here.
    if len(starts) != count + 1:
        starts = starts[: count + 1]
    if len(lens) != count:
        lens = lens[:count]
    if len(table) != count:
        table = table[:count]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table,
        slot_mapping=common.slot_mapping,
        num_seqs=count,
        num_tokens=common.num_actual_tokens,
        max_query_len=longest,
        max_seq_len=common.max_seq_len,
        num_decodes=count if longest <= 1 else leading_decodes(common.query_start_loc_cpu.numpy()[: count + 1]),
        shared_prefix_len=shared_prefix_len,
        block_size=block_size,
    )


def leading_decodes(starts: np.ndarray) -> int:
    """Sequences of one new token before the first of another number, by their starts [B + 1]."""
    others = np.diff(starts) != 1
    return int(others.argmax()) if others.any() else len(others)
