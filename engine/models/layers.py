"""The small layers of a dense decoder, rounding where transformers rounds so that tokens can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .fused_ops import linear, rms_norm, silu_mul


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, of the sum with a residual stream where there is one."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, size] to the same shape and dtype; `residual` is added to in place."""
        return rms_norm(x, self.weight, self.eps, residual)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] to the parts side by side, [T, sum of sizes]."""
        return linear(x, self.weight, self.bias)


class Linear(nn.Linear):
    """A linear layer over rows [T, in_features]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up merged."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden_size, (intermediate_size,) * 2, bias, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))
