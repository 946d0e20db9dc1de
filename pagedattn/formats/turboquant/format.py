"""TurboQuant: rows rotated, each element as one of 16, 8 or 4 levels, times a float16 factor of each token and head.

Rotated by signs drawn at random and Hadamard matrices, a row's elements are nearly independent normal ones of equal
variance, for which one codebook serves all rows (`codebook.py`). The factor gives a stored row the length that it had:
levels of least squared error alone would be shorter by 0.5 % (4 bits), 1.7 % (3) and 6 % (2), and logits with them.
Queries are rotated as keys are, and outputs back as values are, once per layer. Source: TurboQuant (Zandieh et al.,
2025), its variant for squared error; of that for inner products, with a sign of each residual, the variance goes
through the exponential of softmax, and implementers found it worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels
from ..bit_packing.packing import bytes_of, pack, unpack
from ..hadamard.rotation import rotate_back
from ..hadamard.steps import FRACTION, rotated_steps, step_size
from .codebook import LEVELS, UNITS, edge_of

LARGEST = 65504.0  # float16; a row of a larger factor is stored shorter than it is


class TurboQuantRows(RowFormat):
    """Codes c in 0..2**bits - 1, which stand for `LEVELS[bits][c]`.

    4 and 2 bits are packed as they are. Of 3, the lower two are packed four to a byte, and after them the upper ones
    eight to a byte. The second plane holds |row| / |levels| in float16: at most LARGEST, and from 6e-5 on with 11
    binary digits. Sums are of integers, and what follows them are single operations that IEEE rounds in one way, so
    that kernels write the same bits. A row with an element that is not finite becomes NaN.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"turboquant{bits}"
        self.codes = self.name

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        width = bytes_of(dim, 2) + bytes_of(dim, 1) if self.bits == 3 else bytes_of(dim, self.bits)
        return Plane(torch.uint8, width), Plane(torch.float16, 1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        dim, levels = rows.shape[-1], LEVELS[self.bits]
        steps, up = rotated_steps(rows)
        length = root((steps * steps).sum(-1, keepdim=True))
        size, number = steps.abs().float(), torch.zeros_like(steps)
        for at in range(len(levels) // 2 - 1):
            number += size >= length * edge_of(levels, UNITS[self.bits], at, dim)
        half = len(levels) // 2
        code = torch.where(steps < 0, half - 1 - number, half + number)
        level = torch.tensor(levels, device=rows.device)[code]
        factor = length / root((level * level).sum(-1, keepdim=True)) * step_size(dim, FRACTION) * up
        return self._pack(code), factor.clamp(max=LARGEST).to(torch.float16)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), -1) if self.bits == 3 else pack(codes, self.bits)

    def _unpack(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        if self.bits != 3:
            return unpack(packed, self.bits, dim)
        lower, upper = packed.split((bytes_of(dim, 2), bytes_of(dim, 1)), -1)
        return unpack(lower, 2, dim) | unpack(upper, 1, dim) << 2

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        packed, factor = planes
        levels = torch.tensor(LEVELS[self.bits], dtype=dtype, device=packed.device)
        return rotate_back(levels[self._unpack(packed, dim).long()] * factor.to(dtype))

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KEY_KERNELS

        return KEY_KERNELS[self.bits]


def root(squares: torch.Tensor) -> torch.Tensor:
    """Of whole numbers as float32, to the nearest. torch takes roots of float32 with an error on some CPUs."""
    return squares.float().double().sqrt().float()


class TurboQuantValues(TurboQuantRows):
    """The same for values, whose rotation is undone in the output."""

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import VALUE_KERNELS

        return VALUE_KERNELS[self.bits]


TURBOQUANT = tuple(
    CacheFormat(
        name,
        TurboQuantRows(key_bits),
        TurboQuantValues(value_bits),
        best_block_size=32,  # two warps' products of a decode on Hopper
        usual_window=64,  # which decides most of the loss
    )
    for name, key_bits, value_bits in (
        ("turboquant4", 4, 4),
        ("turboquant_k4v3", 4, 3),
        ("turboquant_k3v4", 3, 4),
        ("turboquant3", 3, 3),
        ("turboquant2", 2, 2),
    )
)
