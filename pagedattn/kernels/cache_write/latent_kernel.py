"""Triton: write the latent and the rotated part of each token beside each other, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.mla_rows.device import write_part
from ...runtime.device import on_device
from ...runtime.launcher import Launcher


@triton.jit(do_not_specialize=["num_slots"])
def _concat_and_cache_kernel(
    latent, k_pe, rows, slots, num_slots, sl_t, sp_t, sr_b, sr_s, S: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        row = rows + slot // S * sr_b + slot % S * sr_s
        write_part(latent + token * sl_t, row, 0, L)
        write_part(k_pe + token * sp_t, row, L, R)


_launch = Launcher(_concat_and_cache_kernel, ("latent", "k_pe", "rows", "slots"))


def launch(latent: torch.Tensor, k_pe: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Shapes as in `concat_and_cache_mla`; slot_mapping contiguous, one slot at least."""
    blocks, size = rows.shape[:2]
    strides = (latent.stride(0), k_pe.stride(0), rows.stride(0), rows.stride(1))
    constants = {"S": size, "L": latent.shape[1], "R": k_pe.shape[1]}
    with on_device(rows):
        arguments = (latent, k_pe, rows, slot_mapping, blocks * size, *strides)
        _launch((len(slot_mapping),), arguments, constants, num_warps=2 if latent.shape[1] >= 256 else 1)
