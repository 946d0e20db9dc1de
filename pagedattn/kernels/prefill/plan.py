"""Launch configuration of the prefill kernel, a pure function of shapes and target."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...runtime.target import Target
from ...spec import Mask
from ..tiles import next_power_of_2, shared_memory

_MAX_ROWS = 128
_FEW_KEYS = 64  # that a query sees: in tiles of 32, of which more programs run at once than of two stages of 64


class AttentionConfig(NamedTuple):
    """block_m packed rows x block_n keys per tile, `heads` query heads of a group in a program."""

    block_m: int
    block_n: int
    heads: int
    num_warps: int
    num_stages: int


@cache
def attention_config(
    *,
    group: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    target: Target,
    packed_keys: bool = False,
    tile_keys: int | None = None,
    mask: Mask | None = None,
) -> AttentionConfig:
    """The configuration of the prefill kernel. It depends on the heads, the cache's format and the mask alone, so that
    a token's result may. packed_keys: codes of less than a byte, taken apart in registers, where rotated queries are
    too. tile_keys: the most that the format takes."""
    hopper, consumer = target.shared_bytes > 200_000, target.shared_bytes < 110_000
    # wgmma takes 64 rows per four warps; mma of other GPUs spills there and wants eight warps for 128.
    few = hopper or (consumer and packed_keys)
    block_m, block_n, num_stages = min(_MAX_ROWS, max(64 if few else 128, next_power_of_2(group))), 64, 2
    if itemsize == 4:
        block_m, block_n = min(block_m, 64), 32
    elif packed_keys or (consumer and head_dim > 64):
        block_n = 32
    if mask is not None and mask.own_block and mask.own_block * (1 + (mask.recent_blocks or 0)) <= _FEW_KEYS:
        block_n, num_stages = min(block_n, 32), 1
    block_n = min(block_n, tile_keys or block_n)
    while shared_memory(block_m, block_n, num_stages, head_dim, head_dim_v, itemsize) > target.shared_bytes:
        if block_n > 32:
            block_n //= 2
        elif block_m > 16:
            block_m //= 2
        elif block_n > 16:
            block_n //= 2
        elif num_stages > 1:
            num_stages -= 1
        else:
            break
    warps = 8 if block_m > 64 or block_n > 64 or packed_keys else 4
    return AttentionConfig(block_m, block_n, min(group, block_m), warps, num_stages)
