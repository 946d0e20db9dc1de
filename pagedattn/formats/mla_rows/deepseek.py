"""Rows of 656 bytes, `fp8_ds_mla`: 512 latent elements of e4m3 in four groups with scales, 64 rotated of bfloat16.

A row is what FlashMLA, vLLM and SGLang keep for DeepSeek-V3.2: codes (512 bytes), four float32 scales (16), rotated
part (128). A scale is the largest |element| of its 128 / 448. Keys and values are the same bytes, of which a value is
the first 512 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ...errors import InvalidInputError
from ..base import CacheFormat, Plane, RowFormat, RowKernels
from ..fp8.format import FP8, SMALLEST_MAXIMUM

NAME = "fp8_ds_mla"
LATENT, ROPE, GROUP = 512, 64, 128
SCALES_AT, ROPE_AT = LATENT, LATENT + 4 * (LATENT // GROUP)  # bytes of a row
ROW_BYTES = ROPE_AT + 2 * ROPE
_CODES = torch.float8_e4m3fn


def encode(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., 576] as bytes [..., 656]."""
    groups = rows[..., :LATENT].float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAXIMUM)
    scales = largest / torch.full_like(largest, FP8[_CODES])  # not by a number: CUDA would multiply by its reciprocal
    codes = (groups / scales).clamp(-FP8[_CODES], FP8[_CODES]).to(_CODES).flatten(-2)
    parts = (codes, scales.squeeze(-1), rows[..., LATENT:].to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def decode(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [..., 656] as the rows [..., 576] that they stand for; products are float32 or wider, and rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    codes, scales, rope = (part.contiguous() for part in stored.split((SCALES_AT, ROPE_AT - SCALES_AT, 2 * ROPE), -1))
    groups = codes.view(_CODES).to(wide).unflatten(-1, (-1, GROUP))
    latent = (groups * scales.view(torch.float32).to(wide)[..., None]).flatten(-2)
    return torch.cat((latent, rope.view(torch.bfloat16).to(wide)), -1).to(dtype)


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether each row [..., 656] begins at 4 bytes, where its scales are read from."""
    steps = (*rows.stride()[:-1], rows.storage_offset())
    return rows.stride(-1) == 1 and all(step % 4 == 0 for step in steps)


def views(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Aligned rows as their bytes, as float32, and as the bits of bfloat16: from the same address, for kernels."""
    return rows, rows.view(torch.float32), rows.view(torch.int16)


class DeepseekRows(RowFormat):
    """Both parts of a row, [..., 1, 576], or as a value its latent part, [..., 1, 512]."""

    def __init__(self, dim: int) -> None:
        self.name, self._dim = NAME, dim

    def planes(self, dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        if dim != self._dim:
            remedy = "take kv_cache_dtype='fp8', one scale for a row of any size"
            raise InvalidInputError("head_dim", f"{LATENT + ROPE}, {LATENT} of them latent, for {NAME!r}", dim, remedy)
        return (Plane(torch.uint8, ROW_BYTES),)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return (encode(torch.nn.functional.pad(rows, (0, LATENT + ROPE - self._dim))),)

    def decode(self, planes: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
        return decode(planes[0], dtype)[..., : self._dim]

    @cached_property
    def kernels(self) -> RowKernels:
        """None: kernels of latent attention read these rows by functions of their own (`mla_rows/device.py`)."""
        return RowKernels(None, None)


DS_MLA = CacheFormat(NAME, DeepseekRows(LATENT + ROPE), DeepseekRows(LATENT), latent_only=True)
