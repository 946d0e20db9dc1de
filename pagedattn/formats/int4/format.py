"""The int4 format: a full block's keys in 15 steps of each channel, its values rotated and in 16 levels of each row.

Keys have channels of very different size and mean, which a scale of a row has to cover and a scale of a channel does
not: at 4 bits the error of attention is less than half. What a channel's scale is, only a full block tells, so that a
block is encoded once, when its last token is there; until then its rows lie in a second KV group in the model's dtype
(`docs/formats.md`). Source: KIVI (ICML 2024), here with a block of the cache for its group of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..base import CacheFormat, Plane, RowFormat, RowKernels
from ..bit_packing.packing import bytes_of, pack, unpack
from ..k8v4.format import RotatedRows4

STEPS = 15
LARGEST = 65472.0  # of float16, that has a bit to spare; channels that reach beyond are cut off


def unit_of(largest: torch.Tensor) -> torch.Tensor:
    """Of channels whose largest elements are `largest`, float32: 2**-10 of the power of two at or below them, or of the
    next one where STEPS units more would be above that."""
    exponent = (largest * (1 + 2**-6)).view(torch.int32) >> 23
    return ((exponent - 10).clamp_min(127 - 24) << 23).view(torch.float32)


class ChannelSteps(RowFormat):
    """Codes c in 0..15, packed as neighbours of a row; c stands for least + c * step of its channel.

    The second plane holds, of each channel of a block, the step and then the least element, both float16 and multiples
    of one unit, a power of two such that all that codes may stand for are at most 2048 units: float16 has each of them,
    so that kernels may multiply with the elements themselves. The unit is a 2048th to a 1024th of the largest element
    (at least 2**-24). step is the channel's width / STEPS, to the nearest unit, or where it is a few units rather to
    the next one above, least what puts the steps in the middle of the channel, and codes are the nearest to what the
    two stand for, 0 where the step is 0. All are single operations that IEEE rounds in one way, so that kernels write
    the same bits. A channel with an element that is not finite becomes NaN in the whole block.
    """

    name = codes = "int4_per_channel"
    whole_blocks = True
    tile_keys = 32  # of one block: its steps and least elements are loaded once

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return Plane(torch.uint8, bytes_of(dim, 4)), Plane(torch.float16, 2 * dim, per_block=True)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        wide = rows.float()
        finite = (wide.abs() < torch.inf).all(-3, keepdim=True)
        wide = torch.where(finite, wide, 0.0)
        low, high = wide.amin(-3, keepdim=True), wide.amax(-3, keepdim=True)
        low, high = low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST)
        unit = unit_of(torch.maximum(low.abs(), high.abs()))
        # By a tensor: torch multiplies CUDA tensors by the reciprocal of a number.
        width = (high - low) / unit / torch.full((), float(STEPS), device=rows.device)
        step = (width - (width / 16).clamp_max(0.5)).ceil() * unit
        least = ((low + high - step * STEPS) / (2 * unit)).round() * unit
        least = torch.minimum(least.clamp_min(-LARGEST), LARGEST - step * STEPS)
        least = torch.where(least == 0, 0.0, least)  # the least of 0 and -0 depends on the order of the rows
        steps = (wide - least) / torch.where(step == 0, 1.0, step)
        codes = torch.where(step == 0, 0.0, steps.round().clamp(0, STEPS)).to(torch.uint8)
        return pack(codes, 4), torch.cat((torch.where(finite, step.half(), torch.nan), least.half()), -1)

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        packed, channels = planes
        wide = torch.promote_types(dtype, torch.float32)  # 15 steps alone may be more than float16 has
        step, least = channels.to(wide).split(dim, -1)
        return (unpack(packed, 4, dim).to(wide) * step + least).to(dtype)

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import KEYS

        return KEYS


class BlockValues(RotatedRows4):
    """As k8v4's, but encoded a block at a time."""

    whole_blocks = True

    @cached_property
    def kernels(self) -> RowKernels:
        from .device import VALUES

        return VALUES


# Of fewer than 32 tokens a block, channels would take more for their steps than the tokens save.
INT4 = CacheFormat("int4", ChannelSteps(), BlockValues(), block_multiple=32)
