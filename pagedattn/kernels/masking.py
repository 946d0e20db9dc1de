"""Device code that attention kernels share: which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_mask(visible, distance, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """What of `visible` is not past a token, nor behind its window; `distance` is key minus query position."""
    if CAUSAL:
        visible = visible & (distance <= 0)
    if WINDOW > 0:
        visible = visible & (distance > -WINDOW)
        if not CAUSAL:
            visible = visible & (distance < WINDOW)
    return visible
