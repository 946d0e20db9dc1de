"""`--device` of the commands that compute something: a device that is not here is refused as it is read."""

from __future__ import annotations

import argparse

import torch


def present_device(given: str) -> torch.device:
    """The device called `given`, where torch can put a tensor on it; for argparse."""
    try:
        device = torch.device(given)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected a device such as cuda or cpu, got {given!r}") from None
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return device  # a tensor would make a CUDA context here, beside those of an engine's ranks
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each kind of device has an exception of its own; the first line of some is 300 words
        why = (str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__)[:200]
        raise argparse.ArgumentTypeError(f"expected a device that is here, got {given!r}: {why}") from None
    return device
