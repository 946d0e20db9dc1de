"""HostBatch: what one step is, as arrays, before anything is sent to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kv_group import KVGroup
from ..scheduler_output import SchedulerOutput
from .persistent_batch import BlockTableUpdates, PersistentBatch


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One step of B requests and T tokens, as the host knows it."""

    tokens: np.ndarray  # [T] int32, negative where the host has not read the token yet
    starts: np.ndarray  # [B] int32, position of each request's first new token
    ends: np.ndarray  # [B] int32
    rows: np.ndarray  # [B] int32, where the device state has the requests
    sampled: np.ndarray  # [n] int32, those of the B whose next token is sampled
    deltas: BlockTableUpdates
    num_decodes: int
    shared: list[int]  # by KV group, tokens that all sequences have in the same blocks
    needs_processing: bool  # whether a sampled request has penalties, min_tokens or logprobs

    @property
    def only_decodes(self) -> bool:
        """Whether every row is a decode, and is sampled."""
        return self.num_decodes == len(self.rows) == len(self.sampled)


class HostBatchBuilder:
    """Packs steps for a model whose layers use `groups`, by what the device has of their requests."""

    def __init__(self, groups: Sequence[KVGroup], state: PersistentBatch) -> None:
        self._groups, self._state = groups, state

    def pack(self, step: SchedulerOutput) -> HostBatch:
        """All that the device has to be told. After an error before the step's end, the state must `forget`."""
        requests, firsts, sizes, samples = zip(*step.scheduled, strict=True)
        starts = np.array(firsts, dtype=np.int32)
        ends = starts + np.array(sizes, dtype=np.int32)
        rows, deltas = self._state.place(requests, starts, ends)
        sampled = np.flatnonzero(samples).astype(np.int32)
        decodes = step.num_decodes == len(requests)
        shared = self._shared(rows, int(ends.min())) if decodes else [0] * len(self._groups)
        needs_processing = bool(self._state.needs_processing[rows[sampled]].any())
        return HostBatch(_tokens(step), starts, ends, rows, sampled, deltas, step.num_decodes, shared, needs_processing)

    def _shared(self, rows: np.ndarray, shortest: int) -> list[int]:
        """Tokens that all sequences have in the same blocks, by group; none where a window has let go of blocks."""
        return [
            0 if group.sliding_window else size * _same_columns(table.host, rows, shortest // size)
            for table, group, size in zip(self._state.block_tables, self._groups, self._state.block_sizes, strict=True)
        ]


def _tokens(step: SchedulerOutput) -> np.ndarray:
    decodes = [request.token_ids[start] for request, start, _, _ in step.scheduled[: step.num_decodes]]
    rest = step.scheduled[step.num_decodes :]
    chunks = (np.array(request.token_ids[start : start + size], dtype=np.int32) for request, start, size, _ in rest)
    return np.concatenate([np.array(decodes, dtype=np.int32), *chunks])


def _same_columns(table: np.ndarray, rows: np.ndarray, columns: int) -> int:
    """How many leading ones of so many columns are the same in these rows, two at least, of [rows, blocks]."""
    first = table[rows[0], :columns]
    if len(rows) < 2 or not columns or first[0] != table[rows[-1], 0]:  # as a rule nothing is shared
        return 0
    # The first and the last row bound what is compared of all.
    for some in (rows[-1:], rows):
        same = (table[some, : len(first)] == first).all(0)
        first = first[: len(same) if same.all() else int(same.argmin())]
    return len(first)
