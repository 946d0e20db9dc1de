"""Whether keys and values fit an fp8 cache without scales: some models without norms of keys lose everything there."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pagedattn import CommonAttentionMetadata, PagedKVCache

logger = logging.getLogger("pagedattn.engine")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def warn_of_saturation(cache: PagedKVCache, common_by_group: Mapping[int, CommonAttentionMetadata]) -> None:
    """Say so where an element that a step has stored is its fp8's largest, to which larger ones are cut off. Waits for
    the device."""
    slots_by_group = {group: common.slot_mapping[common.slot_mapping >= 0] for group, common in common_by_group.items()}
    worst, text = 0.0, ""
    for index in range(cache.num_layers):
        layer, slots = cache.layer(index), slots_by_group[cache.group_of(index)]
        for name, codes in (("keys", layer.key), ("values", layer.value)):
            if codes.dtype in _FP8 and len(slots):
                rows = codes.view(torch.uint8)[slots // layer.block_size, slots % layer.block_size]
                most = torch.finfo(codes.dtype).max
                share = float((rows.view(codes.dtype).float().abs() >= most).float().mean())
                if share > worst:
                    worst, text = share, f"{share:.2%} of the {name} of layer {index} reach {most:g}"
    if worst:
        remedy = "kv_cache_dtype='int8' has a scale of each token and head"
        logger.warning("the fp8 cache has no scales, and %s, where larger ones are cut off: %s", text, remedy)
