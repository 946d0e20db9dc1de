"""Every launch goes to its tensors' device, whatever the current one is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A guard that makes `tensor`'s GPU current for a launch; nothing where it is so already."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
