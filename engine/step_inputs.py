"""StepInputs: what one step feeds the model, packed on the host into one buffer and sent in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pagedattn import CommonAttentionMetadata, ops

from .step import KVGroup, ScheduledRequest, Step

_ALIGN = 32  # int32 elements: every part starts on 128 bytes, as kernels and their compilers like it


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step of T tokens."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    sampled_rows: torch.Tensor  # [n] int32, rows of the step whose next token is sampled
    commons: dict[int, CommonAttentionMetadata]  # by KV group


class InputPacker:
    """Packs steps for a model whose layers use `groups`. The host buffer grows to the largest step seen."""

    def __init__(self, groups: Sequence[KVGroup], device: torch.device) -> None:
        self._block_sizes = [group.block_size for group in groups]
        self._windows = [group.sliding_window for group in groups]
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)
        self._sent: torch.cuda.Event | None = None

    def pack(self, step: Step) -> StepInputs:
        """Everything of `step`, with slots computed on the device. Reads tables from the requests, keeps nothing."""
        items = step.scheduled
        groups, count = len(self._block_sizes), len(items)
        counts = np.array([item.num_tokens for item in items], dtype=np.int32)
        ends = np.array([item.start for item in items], dtype=np.int32) + counts
        query_start_loc = np.concatenate(([0], counts.cumsum(dtype=np.int32)), dtype=np.int32)
        columns = [-(-int(ends.max()) // size) for size in self._block_sizes]
        tokens = _tokens(step)
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(ends - query_start_loc[1:], counts)
        sampled = query_start_loc[1:][[item.samples for item in items]] - 1
        tables = _tables(items, columns)
        shared = self._shared(tables, int(ends.min())) if step.num_decodes == count else [0] * groups
        parts = self._send([tokens, positions, query_start_loc, ends, sampled, tables.reshape(-1)])
        input_ids, positions_dev, starts, seq_lens, rows, table = parts
        table = table.view(groups, count, max(columns))
        slots = torch.empty(groups, len(tokens), dtype=torch.int64, device=self._device)
        ops.compute_slot_mapping(table, self._block_sizes, starts, seq_lens, slots)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=table[0],
            slot_mapping=slots[0],
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens_cpu=torch.from_numpy(ends),
            num_seqs=count,
            num_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            num_decodes=step.num_decodes,
        )
        commons = {
            g: common.replace(block_table=table[g], slot_mapping=slots[g], shared_prefix_len=shared[g])
            for g in range(groups)
        }
        return StepInputs(input_ids, positions_dev, rows, commons)

    def _shared(self, tables: np.ndarray, shortest: int) -> list[int]:
        """Tokens that all sequences have in the same blocks, by group; none where a window has let go of blocks."""
        return [
            0 if window else size * _same_columns(table[:, : shortest // size])
            for table, size, window in zip(tables, self._block_sizes, self._windows, strict=True)
        ]

    def _send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One transfer for all arrays; returns the device views, each on an aligned start."""
        sizes = [array.size for array in arrays]
        starts = np.cumsum([0] + [-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
        if self._sent is not None:
            self._sent.synchronize()  # the last transfer still reads the buffer, if its step failed early
        if self._host.numel() < starts[-1]:
            self._host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host = self._host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            host[start : start + array.size] = array
        device = self._host[: starts[-1]].to(self._device, non_blocking=True, copy=True)
        if self._device.type == "cuda":
            self._sent = event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return [device[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _tokens(step: Step) -> np.ndarray:
    decodes = np.array([item.request.token_ids[item.start] for item in step.scheduled[: step.num_decodes]], np.int32)
    chunks = [
        np.array(item.request.token_ids[item.start : item.start + item.num_tokens], np.int32)
        for item in step.scheduled[step.num_decodes :]
    ]
    return np.concatenate([decodes, *chunks])


def _same_columns(table: np.ndarray) -> int:
    """How many leading columns of [sequences, blocks] are the same in all rows, of two rows at least."""
    if len(table) < 2 or not table.shape[1] or table[0, 0] != table[-1, 0]:  # as a rule nothing is shared
        return 0
    # The first and the last row bound what is compared of all.
    for rows in (table[-1:], table):
        same = (rows[:, : table.shape[1]] == table[0]).all(0)
        table = table[:, : len(same) if same.all() else int(same.argmin())]
    return table.shape[1]


def _tables(items: Sequence[ScheduledRequest], columns: Sequence[int]) -> np.ndarray:
    """[groups, sequences, widest] int32; entries past a sequence's blocks are never followed."""
    tables = np.zeros((len(columns), len(items), max(columns)), dtype=np.int32)
    for group, table in enumerate(tables):
        rows = [item.request.block_ids[group][: columns[group]] for item in items]
        lengths = np.array([len(row) for row in rows])
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
        table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return tables
