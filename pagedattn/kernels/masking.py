"""Device code that attention kernels share: which keys a query sees. The host half is `pagedattn/spec/mask.py`.

MASK is `Mask.constants`: whether causal, the window, and where they are given the blocks of `own_block`, of
`earlier_blocks`, `recent_blocks`, `from_block` and `to_block` (0 is none). Kernels pass it on and read nothing of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def length_of(mask, at):
    """The constant at a place of the mask, 0 behind its last one."""
    return mask[at] if at < len(mask) else 0


@triton.constexpr_function
def is_causal(mask):
    """Whether no query sees a key behind it."""
    return mask[0] != 0


@triton.constexpr_function
def sees_first_keys(mask):
    """Whether a query sees every key before the end that `end_key` gives it: tiles of the first keys are then whole for
    all rows."""
    return mask[1] == 0 and all(length == 0 for length in (*mask[2:3], *mask[5:6]))


@triton.constexpr_function
def stops_early(mask):
    """Whether even the last query of a sequence does not see its last keys."""
    return any(length > 0 for length in mask[3:4])


@triton.constexpr_function
def first_encoded(mask):
    """The first key of the blocks that `from_block` leaves, 0 without it."""
    return length_of(mask, 5) * length_of(mask, 3)


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
    OWN: tl.constexpr = length_of(MASK, 2)
    EARLIER: tl.constexpr = length_of(MASK, 3)
    if OWN > 0:
        keep = keep & (k_pos // OWN <= q_pos // OWN) & (k_pos >= _first_recent(q_pos, OWN, MASK))
    if EARLIER > 0:
        keep = keep & (k_pos < _first_recent(q_pos, EARLIER, MASK))
    if first_encoded(MASK) > 0:
        keep = keep & (k_pos >= first_encoded(MASK))
    if length_of(MASK, 6) > 0:
        keep = keep & (k_pos < length_of(MASK, 6) * EARLIER)
    return keep


@triton.jit
def _first_recent(position, SIZE: tl.constexpr, MASK: tl.constexpr):
    """The first key of the query's own block, or of the first that counts as it; may be negative."""
    return (position // SIZE - length_of(MASK, 4)) * SIZE


@triton.jit
def first_key(position, MASK: tl.constexpr):
    """The first key that a query at `position`, or at a later one, sees; may be negative."""
    low = position * 0
    if MASK[1] > 0:
        low = position - MASK[1] + 1
    OWN: tl.constexpr = length_of(MASK, 2)
    if OWN > 0:
        low = tl.maximum(low, _first_recent(position, OWN, MASK))
    if first_encoded(MASK) > 0:
        low = tl.maximum(low, first_encoded(MASK))
    return low


@triton.jit
def end_key(position, num_keys, MASK: tl.constexpr):
    """The end of the keys that a query at `position`, or at an earlier one, sees."""
    end = num_keys
    if MASK[0]:
        end = tl.minimum(end, position + 1)
    elif MASK[1] > 0:
        end = tl.minimum(end, position + MASK[1])
    EARLIER: tl.constexpr = length_of(MASK, 3)
    if EARLIER > 0:
        end = tl.minimum(end, tl.maximum(_first_recent(position, EARLIER, MASK), 0))
    if length_of(MASK, 6) > 0:
        end = tl.minimum(end, length_of(MASK, 6) * EARLIER)
    return end
