"""The small layers of a dense decoder, rounding where transformers rounds so that tokens can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Computed in float32 in every model dtype, float64 included, and rounded before the weight: as transformers does.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] of any strides to the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class MergedLinear(nn.Module):
    """Several projections of one input as one matrix: rows of part i follow those of part i - 1."""

    def __init__(
        self, in_features: int, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        rows = sum(sizes)
        self.sizes = tuple(sizes)
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, in_features] to one view [T, size] per part."""
        return nn.functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up merged."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden_size, (intermediate_size,) * 2, bias, dtype, device)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)
        return self.down_proj(nn.functional.silu(gate) * up)
