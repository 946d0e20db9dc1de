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
    max_registers: int | None = None


@cache
def target_of(device: torch.device) -> Target:
    """The target of a CUDA device; elsewhere (the interpreter) one so large that short sequences are split too."""
    if device.type != "cuda":
        return Target(num_sms=64, shared_bytes=232448)
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
    deterministic: bool = False,
) -> AttentionConfig:
    """The configuration for one launch over sequences of at most so many query tokens and keys.

    A deterministic one depends on the heads alone: the tiles of a prompt, whatever the batch, and no split keys.
    """
    if deterministic:
        max_query_len = _MAX_ROWS
    rows = _power_of_2(max(max_query_len, 1) * group)
    one_block = rows <= max(_DECODE_ROWS, _power_of_2(group))
    hopper = target.shared_bytes > 200_000
    busy = num_seqs * num_kv_heads >= 2 * target.num_sms
    if not one_block:
        # wgmma takes 64 rows per four warps; mma of older GPUs spills there and wants eight warps for 128.
        block_m, block_n, num_stages = min(_MAX_ROWS, max(64 if hopper else 128, _power_of_2(group))), 64, 2
    elif busy:  # several programs per SM hide each other's latency
        block_m, block_n, num_stages = max(16, min(rows, _MAX_ROWS)), 64, 2
    else:  # a program has an SM to itself: deep loads of its own
        block_m, block_n, num_stages = max(16, min(rows, _MAX_ROWS)), 128, 3
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
    warps = 8 if block_m * block_n > 64 * 64 and not one_block else 4
    # ptxas would take 162 registers, and a fourth program no longer fit an SM: 358 us instead of 253 (bench/NOTES.md).
    registers = 128 if one_block and busy and block_m == 16 and tile <= 512 else None
    return AttentionConfig(block_m, block_n, heads, splits, one_block, warps, num_stages, registers)


def _splits(programs: int, max_seq_len: int, block_n: int, target: Target) -> int:
    """A program per SM where there are fewer, each with a tile of keys at least."""
    return max(1, min(target.num_sms // max(programs, 1), max_seq_len // block_n, 128))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
