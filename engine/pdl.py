"""Launches that overlap the end of the kernel before (programmatic dependent launch), where the device can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from pagedattn.runtime import Launcher


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until what came before is done, and let what comes next be launched, to wait in its turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class PDLKernel:
    """A kernel that does `pdl_wait(PDL)` before it reads or writes what others write or read."""

    def __init__(self, kernel: Any) -> None:
        """`kernel`: its last constant is PDL."""
        self._launch = Launcher(kernel)

    def __call__(self, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any], **options: Any) -> None:
        """Launch on the device of the first argument, a tensor.

        Args:
            args, constants, options: as `Launcher`, PDL aside.
        """
        device = args[0].device
        chained = device.type == "cuda" and _supports_pdl(device)
        constants = {**constants, "PDL": chained}
        if chained:  # else it is not named: the interpreter does not know it
            options["launch_pdl"] = True
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(grid, args, constants, **options)
        else:
            self._launch(grid, args, constants, **options)


@cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
