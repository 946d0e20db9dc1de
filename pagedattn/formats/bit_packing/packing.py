"""Packing in torch: 8 / bits codes a byte, that of the lowest place in the lowest bits; zeros after the last."""

from __future__ import annotations

import torch


def bytes_of(dim: int, bits: int) -> int:
    """Bytes that `dim` codes of 1, 2 or 4 bits take."""
    return -(-dim * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., D] in 0..2**bits - 1 as uint8 [..., bytes_of(D, bits)]."""
    dim, count = codes.shape[-1], 8 // bits
    whole = torch.nn.functional.pad(codes.to(torch.uint8), (0, -dim % count)).unflatten(-1, (-1, count))
    packed = whole[..., 0]
    for at in range(1, count):
        packed = packed | whole[..., at] << at * bits
    return packed


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The codes uint8 [..., dim] of bytes [..., n]."""
    codes = [packed >> at & (1 << bits) - 1 for at in range(0, 8, bits)]
    return torch.stack(codes, -1).flatten(-2)[..., :dim]
