"""Triton: write the latent and the rotated part of each token beside each other, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.mla_rows.deepseek import views
from ...formats.mla_rows.device import write_groups, write_part
from ...runtime.device import on_device
from ...runtime.launcher import Launcher


@triton.jit(do_not_specialize=["num_slots"])
def _concat_and_cache_kernel(
    latent, k_pe, rows, scales, halves, slots, k_scale, k_scale_value, num_slots, sl_t, sp_t, sr_b, sr_s,
    S: tl.constexpr, L: tl.constexpr, R: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        at = slot // S * sr_b + slot % S * sr_s
        if scales is not None:
            write_groups(latent + token * sl_t, k_pe + token * sp_t, rows, scales, halves, at)
        else:
            scale = k_scale_value
            if k_scale is not None:
                scale = tl.load(k_scale)
            write_part(latent + token * sl_t, rows + at, scale, 0, L, E4M3)
            write_part(k_pe + token * sp_t, rows + at, scale, L, R, E4M3)


_launch = Launcher(
    _concat_and_cache_kernel, ("latent", "k_pe", "rows", "scales", "halves", "slots", "k_scale", "k_scale_value")
)


def launch(
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_scale_value: float,
) -> None:
    """Shapes as in `concat_and_cache_mla`; slot_mapping contiguous, one slot at least. k_scale: float32 [1]; None:
    k_scale_value in its place."""
    blocks, size = rows.shape[:2]
    strides = (latent.stride(0), k_pe.stride(0), rows.stride(0), rows.stride(1))
    encoded = rows.dtype != latent.dtype
    constants = {"S": size, "L": latent.shape[1], "R": k_pe.shape[1], "E4M3": encoded}
    with on_device(rows):
        codes, scales, halves = rows.view(torch.uint8) if encoded else rows, None, None
        if rows.dtype == torch.uint8:
            codes, scales, halves = views(rows)
        arguments = (latent, k_pe, codes, scales, halves, slot_mapping, k_scale, k_scale_value, blocks * size, *strides)
        _launch((len(slot_mapping),), arguments, constants, num_warps=2 if latent.shape[1] >= 256 else 1)
