"""HostBatch: what one step is, as arrays, before anything is sent to a device. All ranks of a model get the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kv_group import KVGroup, groups_of_layers
from ..sampling.metadata import SamplingMetadata, SamplingMetadataBuilder
from ..scheduler_output import SchedulerOutput
from .persistent_batch import BlockTableUpdates, PersistentBatch

_NONE = np.zeros(0, dtype=np.int32)


class BlockMoves(NamedTuple):
    """What is done with whole blocks before anything else, in this order; int32 [k, 2], source and target."""

    swap_out: np.ndarray  # to blocks of the host
    fresh: np.ndarray  # [k], handed out for this step
    swap_in: np.ndarray  # from blocks of the host
    copies: np.ndarray
    recent_fresh: np.ndarray = _NONE  # of the second cache, as `fresh` and `copies`
    recent_copies: np.ndarray = _NONE


class HostBatch(NamedTuple):
    """One step of B requests and T tokens, as the host knows it."""

    tokens: np.ndarray  # [T] int32, negative where the host has not read the token yet
    starts: np.ndarray  # [B] int32, position of each request's first new token
    ends: np.ndarray  # [B] int32
    rows: np.ndarray  # [B] int32, where the device state has the requests
    sampled: np.ndarray  # [n] int32, those of the B whose next token is sampled
    updates: BlockTableUpdates
    num_decodes: int
    shared: list[int]  # by KV group of layers, tokens that all sequences have in the same blocks
    sampling: SamplingMetadata | None  # None where no sampled request has penalties, min_tokens or logprobs
    moves: BlockMoves

    @property
    def only_decodes(self) -> bool:
        """Whether every row is a decode, and is sampled."""
        return self.num_decodes == len(self.rows) == len(self.sampled)


class HostBatchBuilder:
    """Packs steps for a model whose layers use `groups`, by what the device has of their requests."""

    def __init__(self, groups: Sequence[KVGroup], state: PersistentBatch) -> None:
        self._groups, self._state = groups_of_layers(groups), state
        self._has_recent = len(self._groups) < len(groups)
        self._sampling = SamplingMetadataBuilder(state.num_rows)

    def forget(self) -> None:
        """Take it for unknown what the device has, as it is after an error before a packed step's end."""
        self._state.forget()
        self._sampling.forget()

    def pack(self, step: SchedulerOutput) -> HostBatch:
        """All that the device has to be told; of a step that only moves blocks nothing else."""
        requests, firsts, sizes, samples = zip(*step.scheduled, strict=True) if step.scheduled else ((),) * 4
        starts = np.array(firsts, dtype=np.int32)
        ends = starts + np.array(sizes, dtype=np.int32)
        rows, updates = self._state.place(requests, starts, ends)
        sampled = np.flatnonzero(samples).astype(np.int32)
        decodes = step.num_decodes == len(requests) > 0
        shared = self._shared(rows, int(ends.min())) if decodes else [0] * len(self._groups)
        own = rows[sampled]
        needs = self._state.needs_processing[own].any()
        sampling = self._sampling.build([one.request for one in step.scheduled if one.samples], own) if needs else None
        moves = BlockMoves(_pairs(step.swap_out), _int32(step.fresh_blocks), _pairs(step.swap_in), _pairs(step.copies))
        if self._has_recent:
            moves = moves._replace(recent_fresh=_int32(step.recent_fresh), recent_copies=_pairs(step.recent_copies))
        tokens = _tokens(step)
        return HostBatch(tokens, starts, ends, rows, sampled, updates, step.num_decodes, shared, sampling, moves)

    def _shared(self, rows: np.ndarray, shortest: int) -> list[int]:
        """Tokens that all sequences have in the same blocks, by group; none where a window has let go of blocks."""
        return [
            0 if group.sliding_window else size * _same_columns(table.host, rows, shortest // size)
            for group, table, size in zip(self._groups, self._state.block_tables, self._state.block_sizes, strict=False)
        ]


def _int32(values: Sequence[object]) -> np.ndarray:
    return np.array(values, dtype=np.int32) if values else _NONE


def _pairs(values: Sequence[tuple[int, int]]) -> np.ndarray:
    return _int32(values).reshape(-1, 2)


def _tokens(step: SchedulerOutput) -> np.ndarray:
    decodes = [request.token_ids[start] for request, start, _, _ in step.scheduled[: step.num_decodes]]
    rest = step.scheduled[step.num_decodes :]
    chunks = (np.array(request.token_ids[start : start + size], dtype=np.int32) for request, start, size, _ in rest)
    return np.concatenate([np.array(decodes, dtype=np.int32), *chunks])


def _same_columns(table: np.ndarray, rows: np.ndarray, columns: int) -> int:
    """How many of the first `columns` columns are equal in these rows (two or more) of a table [rows, blocks]."""
    first = table[rows[0], :columns]
    if len(rows) < 2 or not columns or first[0] != table[rows[-1], 0]:  # as a rule nothing is shared
        return 0
    # The first and the last row bound what is compared of all.
    for some in (rows[-1:], rows):
        same = (table[some, : len(first)] == first).all(0)
        first = first[: len(same) if same.all() else int(same.argmin())]
    return len(first)
