"""Target: what a launch configuration depends on of a device."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """What a launch configuration depends on of a device. supports_pdl: a launch may overlap the kernel before it."""

    num_sms: int
    shared_bytes: int
    supports_pdl: bool = False


def pdl_option(supports_pdl: bool) -> dict[str, bool]:
    """Of a launch that may overlap the kernel before it. Named only where it is there: the interpreter does not know
    it."""
    return {"launch_pdl": True} if supports_pdl else {}


@cache
def target_of(device: torch.device) -> Target:
    """The target of a CUDA device; elsewhere (the interpreter) one so large that short sequences are split too."""
    if device.type != "cuda":
        return Target(num_sms=64, shared_bytes=232448)
    properties = torch.cuda.get_device_properties(device)
    sms, shared = properties.multi_processor_count, properties.shared_memory_per_block_optin
    return Target(sms, shared, properties.major >= 9)
