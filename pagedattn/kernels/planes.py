"""Second planes of a cache, the scales that some formats keep: where in them a slot's scales are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_rows(block, slot, kv_head, STRIDES: tl.constexpr):
    """Offsets of slots' scales of a KV head, or of each of several, in a plane of these strides, int64 [BLOCK_N]; of no
    meaning where there is none."""
    row = block
    if STRIDES is not None:
        row = block * STRIDES[0] + slot * STRIDES[1] + kv_head.to(tl.int64) * STRIDES[2]
    return row
