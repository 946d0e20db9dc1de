"""The tile schedule of a step: query blocks, or splits of their keys, in the order in which programs take them."""

from __future__ import annotations

import torch

from ...runtime.op_registry import load
from .plan import SPLIT_FIELDS, TileSchedulerParams, tokens_per_tile


def has_splits(schedule: torch.Tensor) -> bool:
    """Whether tiles of a schedule may be splits of one query block's keys."""
    return schedule.shape[1] == SPLIT_FIELDS


def fill_tile_schedule(
    params: TileSchedulerParams, schedule: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Fill a schedule, int32 of `schedule_shape`, for sequences [B] on the device; no length is read by the host."""
    if has_splits(schedule):
        scheduler = load("kernels.prefill_sm90.split_kv_scheduler")
        scheduler.launch(query_start_loc, seq_lens, schedule, params)
    else:
        scheduler = load("kernels.prefill_sm90.tile_scheduler")
        scheduler.launch(query_start_loc, seq_lens, schedule, tokens_per_tile(params.pack))
