"""LayerCache: how keys, values and scales of one layer lie in its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_LAYOUTS: dict[tuple[object, ...], object] = {}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer gets: logically [P, S, Hkv, D] views whose strides say how they lie in memory."""

    key: torch.Tensor  # [P, S, Hkv, D]
    value: torch.Tensor  # [P, S, Hkv, Dv]; for MLA a view of key
    key_scale: torch.Tensor | None = None  # [P, S, Hkv] float32, int8 caches only
    value_scale: torch.Tensor | None = None
    _layout: object = field(default=None, init=False, repr=False, compare=False)

    @property
    def layout(self) -> object:
        """One object for all caches whose shapes, strides, dtypes and devices are the same; None of tensor subclasses.

        What was found right for a cache is right for every cache of its layout.
        """
        if self._layout is None and type(self.key) is torch.Tensor and type(self.value) is torch.Tensor:
            about = [(x.shape, x.stride(), x.dtype, x.device) for x in (self.key, self.value)]
            shared = self.key.data_ptr() == self.value.data_ptr()
            object.__setattr__(self, "_layout", _LAYOUTS.setdefault((*about, shared), object()))
        return self._layout

    @property
    def num_blocks(self) -> int:
        """P."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """S."""
        return self.key.shape[1]
