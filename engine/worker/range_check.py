"""Whether keys and values fit an fp8 cache without scales: some models without norms of keys lose everything there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, PagedKVCache

logger = logging.getLogger("pagedattn.engine")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class RangeCheck:
    """Looks at what the first prompts stored, once: it waits for the device."""

    def __init__(self, cache: PagedKVCache, layers: Sequence[LayerCache]) -> None:
        self._cache, self._layers = cache, layers
        self.pending = any(layer.key.dtype in _FP8 for layer in layers)

    def look(self, common_by_group: Mapping[int, CommonAttentionMetadata]) -> None:
        """Say so where an element that a step has stored is the format's largest, to which larger ones are cut off."""
        self.pending = False
        worst, text = 0.0, ""
        for index, layer in enumerate(self._layers):
            slots = common_by_group[self._cache.group_of(index)].slot_mapping
            slots = slots[slots >= 0]
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
