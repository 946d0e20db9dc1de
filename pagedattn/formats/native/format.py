"""The native format: elements as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels


class NativeRows(RowFormat):
    """Elements of the model's dtype."""

    name = "auto"

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(dtype, dim),)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        return planes[0].to(dtype)

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KERNELS

        return KERNELS


ROWS = NativeRows()
NATIVE = CacheFormat("auto", ROWS, ROWS, has_csrc=True)
