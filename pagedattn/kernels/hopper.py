"""Whether a GPU runs the kernels for Hopper, and TMA can read a tensor."""

from __future__ import annotations

from functools import cache

import torch

from ..runtime.op_registry import interpreted
from ..runtime.triton_versions import why_untried


def why_not_here(device: torch.device) -> str:
    """Why they cannot run on `device`; "" where they can."""
    return why_not_on(_capability(device))


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def why_not_on(capability: tuple[int, int] | None) -> str:
    """Why they cannot run on a GPU of this compute capability (None: no GPU); "" where they can."""
    if capability != (9, 0):
        return "no Hopper GPU"
    if reason := why_untried():
        return reason
    return "kernels are interpreted" if interpreted() else ""


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether TMA can read it: 16-byte addresses, the last dimension contiguous."""
    steps = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and steps and tensor.stride(-1) == 1
