"""Launch configurations as pure functions of shapes and target, so that they are tested without a GPU."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

_MAX_ROWS = 128
_DECODE_ROWS = 64  # up to so many packed rows a query is one block, and keys are split instead


class Target(NamedTuple):
    """What a launch configuration depends on of a device."""

    num_sms: int
    shared_bytes: int


class AttentionConfig(NamedTuple):
    """block_m packed rows x block_n keys per tile, `heads` query heads of a group in a program; keys split `splits`
    ways; one_block: a sequence is one row block."""

    block_m: int
    block_n: int
    heads: int
    splits: int
    one_block: bool
    num_warps: int
    num_stages: int


@cache
def target_of(device: torch.device) -> Target:
    """The target of a CUDA device; a nominal one elsewhere (the interpreter)."""
    if device.type != "cuda":
        return Target(num_sms=4, shared_bytes=232448)
    properties = torch.cuda.get_device_properties(device)
    return Target(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def attention_config(
    *,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    target: Target,
) -> AttentionConfig:
    """The configuration for one launch over sequences of at most so many query tokens and keys."""
    rows = _power_of_2(max(max_query_len, 1) * group)
    one_block = rows <= max(_DECODE_ROWS, _power_of_2(group))
    if one_block:
        block_m, block_n, num_stages = max(16, min(rows, _MAX_ROWS)), 64, 2
    else:
        block_m, block_n, num_stages = min(_MAX_ROWS, max(64, _power_of_2(group))), 32, 2
    if itemsize == 4:
        block_m, block_n = max(16, min(block_m, 64)), 32
    tile = (_power_of_2(head_dim) + _power_of_2(head_dim_v)) * itemsize
    while block_m * _power_of_2(head_dim) * itemsize + num_stages * block_n * tile + 4096 > target.shared_bytes:
        if num_stages > 2:
            num_stages -= 1
        elif block_n > 32:
            block_n //= 2
        elif block_m > 16:
            block_m //= 2
        elif block_n > 16:
            block_n //= 2
        elif num_stages > 1:
            num_stages -= 1
        else:
            break
    heads = min(group, block_m)
    one_block = one_block and block_m // heads >= max_query_len
    parts = -(-group // heads)
    splits = _splits(num_seqs * num_kv_heads * parts, max_seq_len, block_n, target) if one_block else 1
    return AttentionConfig(block_m, block_n, heads, splits, one_block, 4, num_stages)


def _splits(programs: int, max_seq_len: int, block_n: int, target: Target) -> int:
    """Four programs per SM where there are fewer, but at least two tiles of keys in each."""
    wanted = 4 * target.num_sms // max(programs, 1)
    return max(1, min(wanted, max_seq_len // (2 * block_n), 128))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
