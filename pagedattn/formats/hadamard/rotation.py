"""The rotation in torch: y = H (signs * x) / sqrt(block), with Hadamard matrices of Sylvester's order on H's diagonal.

Without the signs a row of equal elements would become one large element. A block is the largest power of two that
divides the row's length, so that every length is served. Source: QuaRot (2024).
"""

from __future__ import annotations

from functools import lru_cache

import torch


def block_of(dim: int) -> int:
    """Elements of a row of `dim` that are rotated together."""
    return dim & -dim


@lru_cache(maxsize=64)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """1 or -1 of each element, float32 [dim]: a bit of a hash of its place, so that kernels find the same."""
    word = 0xFFFFFFFF
    x = torch.arange(dim, dtype=torch.int64) + 1
    x = (x * 0x9E3779B1) & word
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & word
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & word
    return (1 - 2 * ((x >> 16) & 1)).float().to(device)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """H times each row [..., D], not divided by sqrt(block); sums in the order of the kernels'."""
    dim, size = rows.shape[-1], block_of(rows.shape[-1])
    x = rows.unflatten(-1, (dim // size, size))
    for _ in range(size.bit_length() - 1):  # each time the last bit of an index is transformed, and becomes its first
        a, b = x[..., ::2], x[..., 1::2]
        x = torch.cat((a + b, a - b), -1)
    return x.flatten(-2)


def rotate_back(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as they were before the rotation, in their dtype."""
    dim = rows.shape[-1]
    return hadamard(rows) * (signs(dim, rows.device).to(rows.dtype) * block_of(dim) ** -0.5)
