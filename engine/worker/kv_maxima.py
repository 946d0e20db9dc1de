"""KVMaxima: the largest keys and values of each layer and KV head, over the steps that it sees."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedattn import CommonAttentionMetadata, LayerMaxima, PagedKVCache
from pagedattn.errors import InvalidInputError

from .stored_rows import layers_and_slots, stored_rows


class KVMaxima:
    """Sees what steps store in a cache of 16 or 32 bit, the keys rotated. Waits for nothing but the slots."""

    def __init__(self) -> None:
        self._maxima: dict[tuple[int, int], torch.Tensor] = {}
        self._dims: dict[int, tuple[int, int]] = {}

    def saw_step(self, cache: PagedKVCache, common_by_group: Mapping[int, CommonAttentionMetadata], /) -> bool:
        """As `StepObserver`; wants every step."""
        for index, layer, slots in layers_and_slots(cache, common_by_group):
            self._dims[index] = layer.key.shape[3], layer.value.shape[3]
            for side, plane in enumerate((layer.key, layer.value)):
                if len(slots):
                    largest = stored_rows(plane, slots).abs().amax((0, 2))  # [Hkv]
                    known = self._maxima.get((index, side))
                    self._maxima[index, side] = largest if known is None else torch.maximum(known, largest)
        return True

    def layers(self) -> list[LayerMaxima]:
        """What was found so far.

        Raises:
            InvalidInputError: some key or value is NaN or infinite.
        """
        for (index, side), maxima in self._maxima.items():
            if not maxima.isfinite().all():
                what = f"{('keys', 'values')[side]} of layer {index} up to {maxima.tolist()}"
                remedy = "compute in another dtype, such as bfloat16 or float32"
                raise InvalidInputError("model", "one whose keys and values are finite", what, remedy)
        return [
            LayerMaxima(tuple(self._maxima[index, 0].tolist()), tuple(self._maxima[index, 1].tolist()), *dims)
            for index, dims in sorted(self._dims.items())
        ]
