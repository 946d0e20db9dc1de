"""Whether keys and values fit an fp8 cache without scales: some models without norms of keys lose everything there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from pagedattn import Attention, CommonAttentionMetadata, MLAAttention, PagedKVCache

from .stored_rows import layers_and_slots, stored_rows

logger = logging.getLogger("pagedattn.engine")
_REMEDY = (
    "`pagedattn calibrate MODEL TEXT_FILE` writes scales for kv_scales=, and kv_cache_dtype='int8' has a scale of each "
    "token and head"
)


class RangeCheck:
    """Warns where an element that a step has stored with a scale of 1 is its fp8's largest, to which larger ones are
    cut off. Waits for the device, so it looks at one step only.
    """

    def __init__(self, layers: Sequence[Attention | MLAAttention]) -> None:
        self._layers = layers

    def saw_step(self, cache: PagedKVCache, common_by_group: Mapping[int, CommonAttentionMetadata], /) -> bool:
        """As `StepObserver`."""
        worst, text = 0.0, ""
        for index, layer, slots in layers_and_slots(cache, common_by_group):
            attention = self._layers[index]
            if not attention.spec.format.takes_scales or not len(slots):
                continue
            if isinstance(attention, MLAAttention):
                sides = (("latent rows", layer.key, attention.k_scale),)
            else:
                sides = zip(("keys", "values"), (layer.key, layer.value), attention.kv_scales, strict=True)
            for name, codes, scale in sides:
                if scale is None:
                    most = torch.finfo(codes.dtype).max
                    share = float((stored_rows(codes, slots).abs() >= most).float().mean())
                    if share > worst:
                        worst, text = share, f"{share:.2%} of the {name} of layer {index} reach {most:g}"
        if worst:
            logger.warning("the fp8 cache has no scales, and %s, where larger ones are cut off: %s", text, _REMEDY)
        return False
