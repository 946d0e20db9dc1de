"""Launches that overlap the end of the kernel before (programmatic dependent launch), where the device can."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait until what came before is done, and let what comes next be launched, to wait in its turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def chained(x: torch.Tensor) -> dict[str, Any]:
    """Options of a launch on x's device, of a kernel that does `follow(PDL)` before it reads or writes."""
    # Not named elsewhere: the interpreter does not know the option.
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _has_chains(x.device) else {"PDL": False}


@cache
def _has_chains(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
