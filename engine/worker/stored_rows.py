"""What an eager step has stored, for its observer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, PagedKVCache


def layers_and_slots(
    cache: PagedKVCache, common_by_group: Mapping[int, CommonAttentionMetadata]
) -> Iterator[tuple[int, LayerCache, torch.Tensor]]:
    """Each layer's index, its cache, and the slots [n] that a step has written there."""
    slots = {group: common.slot_mapping[common.slot_mapping >= 0] for group, common in common_by_group.items()}
    for index in range(cache.num_layers):
        yield index, cache.layer(index), slots[cache.group_of(index)]


def stored_rows(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows [n, Hkv, D] of a plane [P, S, Hkv, D] as float32. By bytes: torch indexes no fp8."""
    size = plane.shape[1]
    return plane.view(torch.uint8)[slots // size, slots % size].view(plane.dtype).float()
