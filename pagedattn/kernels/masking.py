"""Device code that attention kernels share: which keys a query sees. The host half is `pagedattn/spec/mask.py`.

MASK is `Mask.constants`: whether causal, and the window (0 is none). Kernels pass it on and read nothing of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def is_causal(mask):
    """Whether no query sees a key behind it."""
    return mask[0] != 0


@triton.constexpr_function
def sees_all_before(mask):
    """Whether a query sees every key before it: tiles of the first keys are then whole for all rows."""
    return mask[1] == 0


@triton.jit
def visible(q_pos, k_pos, MASK: tl.constexpr):
    """Whether queries at q_pos see keys at k_pos, by broadcasting."""
    distance = k_pos - q_pos
    keep = distance == distance
    if MASK[0]:
        keep = distance <= 0
    if MASK[1] > 0:
        keep = keep & (distance > -MASK[1])
        if not MASK[0]:
            keep = keep & (distance < MASK[1])
    return keep


@triton.jit
def first_key(position, MASK: tl.constexpr):
    """The first key that a query at `position`, or at a later one, sees; may be negative."""
    low = position * 0
    if MASK[1] > 0:
        low = position - MASK[1] + 1
    return low


@triton.jit
def end_key(position, num_keys, MASK: tl.constexpr):
    """The end of the keys that a query at `position`, or at an earlier one, sees."""
    end = num_keys
    if MASK[0]:
        end = tl.minimum(end, position + 1)
    elif MASK[1] > 0:
        end = tl.minimum(end, position + MASK[1])
    return end
