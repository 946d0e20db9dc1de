"""Asynchronous transfers of int32 from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 32  # int32 elements: every part starts on 128 bytes, as kernels and their compilers like it


def transfer(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One transfer for all arrays [k] of int32; returns the device views, each on an aligned start."""
    sizes = [array.size for array in arrays]
    starts = np.cumsum([0] + [-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
    sent = pinned((starts[-1],), device)
    target = sent.numpy()
    for array, start in zip(arrays, starts, strict=False):
        target[start : start + array.size] = array
    on_device = sent.to(device, non_blocking=True)
    return [on_device[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def pinned(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on the host, for an asynchronous transfer to `device`.

    Of torch's pool of pinned memory, which hands a buffer out again when its transfer is done.
    """
    return torch.empty(*shape, dtype=torch.int32, pin_memory=device.type == "cuda")
