"""Second planes of a cache, the scales that some formats keep: their strides, and where in them a slot's scales are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def plane_strides(plane: torch.Tensor | None) -> tuple[int, int, int] | None:
    """By block, slot and head, of a plane [P, S or 1, Hkv, n]; one of blocks has the same for all slots."""
    if plane is None:
        return None
    return plane.stride(0), plane.stride(1) if plane.shape[1] > 1 else 0, plane.stride(2)


@triton.jit
def scale_rows(block, slot, kv_head, STRIDES: tl.constexpr):
    """Offsets of slots' scales of a KV head in a plane of these strides, int64 [BLOCK_N]; of no meaning where there is
    none."""
    row = block
    if STRIDES is not None:
        row = block * STRIDES[0] + slot * STRIDES[1] + kv_head.to(tl.int64) * STRIDES[2]
    return row
