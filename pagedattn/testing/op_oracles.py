"""Oracles of the ops that are not attention, one element at a time, written from their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def slot_mapping_oracle(
    tables: Sequence[Sequence[Sequence[int]]],
    block_sizes: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    length: int,
    rows: Sequence[int] | None = None,
    world: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> torch.Tensor:
    """[G, length] int64: every new token's slot per group, -1 for other ranks' tokens, past the table, and the tail."""
    out = torch.full((len(block_sizes), length), -1, dtype=torch.int64)
    for group, size in enumerate(block_sizes):
        token = 0
        for seq, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
            table = tables[group][rows[seq] if rows is not None else seq]
            for position in range(total - new, total):
                column, rest = divmod(position, size * world)
                if 0 <= column < len(table) and rest // interleave % world == rank and token < length:
                    offset = rest // (world * interleave) * interleave + rest % interleave
                    out[group, token] = table[column] * size + offset
                token += 1
    return out


def reshape_and_cache_oracle(
    rows: torch.Tensor, cache: torch.Tensor, slots: Sequence[int], scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """A copy of `cache` [P, S, H, D] with row t written to slots[t] where that is inside.

    `scale` is a number, [1] or [H]; an fp8 cache holds saturate(row / scale).
    """
    out = cache.clone()
    if rows.dtype != cache.dtype:
        most = torch.finfo(cache.dtype).max
        divisor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
        rows = (rows.float() / divisor).clamp(-most, most).to(cache.dtype)
    for row, slot in enumerate(slots):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            out[slot // cache.shape[1], slot % cache.shape[1]] = rows[row]
    return out


def reshape_and_cache_classic_oracle(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of key_cache [P, H, D / x, S, x] and value_cache [P, H, D, S] with the rows written."""
    keys, values = key_cache.clone(), value_cache.clone()
    blocks, heads, dim, size = values.shape
    for row, slot in enumerate(slots):
        if 0 <= slot < blocks * size:
            for head in range(heads):
                for d in range(dim):
                    x = keys.shape[4]
                    keys[slot // size, head, d // x, slot % size, d % x] = key[row, head, d]
                    values[slot // size, head, d, slot % size] = value[row, head, d]
    return keys, values


def copy_blocks_oracle(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """A copy of `target` with the pairs' blocks taken from `source` as it was."""
    out = target.clone()
    for src, dst in pairs:
        out[dst] = source[src]
    return out


def gather_kv_oracle(
    cache: torch.Tensor, table: Sequence[Sequence[int]], lens: Sequence[int], starts: Sequence[int], total: int
) -> torch.Tensor:
    """Rows starts[b] .. starts[b] + lens[b] - 1 of each sequence packed, zeros past the last."""
    out = torch.zeros(total, *cache.shape[2:], dtype=cache.dtype)
    row = 0
    for seq, (count, first) in enumerate(zip(lens, starts, strict=True)):
        for position in range(first, first + count):
            column = position // cache.shape[1]
            if column < len(table[seq]) and 0 <= table[seq][column] < len(cache):
                out[row] = cache[table[seq][column], position % cache.shape[1]]
            row += 1
    return out


def merge_states_oracle(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 merge of [n, T, H, D] and [n, T, H]; a state with LSE -inf counts for nothing."""
    merged = torch.zeros(outputs.shape[1:], dtype=torch.float64)
    lse = lses.double().logsumexp(0)
    for out, one in zip(outputs.double(), lses.double(), strict=True):
        weight = torch.where(one == -torch.inf, 0.0, (one - lse).exp())
        merged += torch.where((weight > 0)[..., None], out * weight[..., None], 0.0)
    return merged, lse
