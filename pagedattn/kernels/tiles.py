"""What launch configurations have in common: tile sizes and the shared memory that tiles take."""

from __future__ import annotations

MIN_SPLIT_KEYS = 2048  # of prompts, from which on it pays to split them however few SMs would be idle


def shared_memory(block_m: int, block_n: int, buffers: int, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes of shared memory: the query tile, a key and a value tile per buffer, and what reductions need."""
    block_d, block_dv = block_dims(head_dim, head_dim_v)
    keys = buffers * block_n * (block_d + block_dv)
    return (block_m * block_d + keys) * itemsize + 4096


def block_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """How wide tiles of keys and of values are.

    Values as wide as keys up to 64: of rows of less than 128 bytes, narrower than those of keys, ptxas 12.8 and 12.9
    take the address from a uniform register that nothing wrote (sm_90), and products read other memory.
    """
    block_d = max(16, next_power_of_2(head_dim))
    return block_d, max(16, next_power_of_2(head_dim_v), min(block_d, 64))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
