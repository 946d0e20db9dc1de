"""Sequences packed back to back: where each begins, and which of their query rows see no key."""

from __future__ import annotations

import torch


def offsets(lens: torch.Tensor) -> torch.Tensor:
    """[B] -> [B + 1] int32 running sums from 0, on the same device."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def rows_without_keys(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, rows: int, causal: bool) -> torch.Tensor:
    """[rows] bool. query_start_loc [B + 1] and seq_lens [B], B at least 1; no value reaches the host."""
    starts, lens = query_start_loc.long(), seq_lens.long()
    row = torch.arange(rows, device=starts.device)
    seq = torch.searchsorted(starts[1:], row, right=True).clamp_(max=len(lens) - 1)
    empty = lens[seq] == 0
    return empty | (row - starts[seq + 1] + lens[seq] < 0) if causal else empty
