"""What launch configurations have in common: tile sizes and the shared memory that tiles take."""

from __future__ import annotations

MIN_SPLIT_KEYS = 2048  # of prompts, from which on it pays to split them


def shared_memory(block_m: int, block_n: int, buffers: int, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes of shared memory: the query tile, a key and a value tile per buffer, and what reductions need."""
    keys = buffers * block_n * (next_power_of_2(head_dim) + next_power_of_2(head_dim_v))
    return (block_m * next_power_of_2(head_dim) + keys) * itemsize + 4096


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
