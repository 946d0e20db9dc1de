"""PersistentBatch: what steps need of each request, kept on the device and sent only where it changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedattn.errors import InvalidInputError

from ..kv_group import KVGroup
from ..request import Request
from ..sampling.packed_params import PARAMS, has_penalty, request_params


class BlockTableUpdates(NamedTuple):
    """What changed since the last step: entries of the flattened block tables, and rows of parameters."""

    entries: np.ndarray  # [k] int32
    blocks: np.ndarray  # [k] int32
    rows: np.ndarray  # [m] int32
    params: np.ndarray  # [m, PARAMS] int32
    current: np.ndarray  # [groups, n] int32, the block of each request's first new token
    beyond: bool  # whether more changed than such blocks

    @property
    def parts(self) -> list[np.ndarray]:
        """What `PersistentBatch.apply` takes, flat."""
        return [self.entries, self.blocks, self.rows, self.params.reshape(-1)]


class PersistentBatch:
    """A row for each request that runs: its block tables, its last token, its sampling parameters.

    Entries of a table before a request's first uncomputed token change only together with the list that holds them, so
    a step sends what is new behind them, and whole tables of what is new to this state. Row `num_rows` is the
    padding row, which the padding of a batch reads and writes.
    """

    def __init__(self, groups: Sequence[KVGroup], num_rows: int, max_model_len: int, device: torch.device) -> None:
        """State of at most `num_rows` requests of at most `max_model_len` tokens each."""
        self.num_rows = num_rows
        self.block_sizes = [group.block_size for group in groups]
        shape = (len(groups), num_rows + 1, -(-max_model_len // min(self.block_sizes)))
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)  # [groups, rows, widest]
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.params = torch.zeros(num_rows + 1, PARAMS, dtype=torch.int32, device=device)
        # On the host: what the tables on the device hold, and whose rows need more than one pass over their logits.
        self.sent = np.zeros(shape, dtype=np.int32)
        self.special = np.zeros(num_rows + 1, dtype=bool)
        self.forget()

    def forget(self) -> None:
        """Give up all rows: after a failed step it is not known what reached the device."""
        self._row_of: dict[Request, int] = {}
        self._lists: list[object] = [None] * self.num_rows
        self._free = list(range(self.num_rows - 1, -1, -1))

    def place(
        self, requests: Sequence[Request], starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, BlockTableUpdates]:
        """The rows [n] of a step's requests, and what has to be sent for them.

        Args:
            starts, ends: [n] int32, the first new token of each, and the end of its new tokens.

        Raises:
            InvalidInputError: more requests than rows.
        """
        find, lists = self._row_of.get, self._lists
        rows = [find(request, -1) for request in requests]
        fresh = [at for at, row in enumerate(rows) if row < 0] if -1 in rows else []
        if fresh:
            self._enter(requests, rows, fresh)
        moved = [
            at for at, (row, one) in enumerate(zip(rows, requests, strict=True)) if lists[row] is not one.block_ids
        ]
        places = np.array(rows, dtype=np.int32)
        current, entries, blocks = self._current_blocks(requests, places, starts)
        for at in moved:
            lists[rows[at]] = requests[at].block_ids
        whole = {*moved}
        more = sorted({*moved, *np.flatnonzero(ends - starts > 1).tolist()})
        for at in more:
            first = 0 if at in whole else int(starts[at])
            self._send(requests[at], rows[at], first, int(ends[at]), entries, blocks)
        params = request_params([requests[at] for at in fresh])
        beyond = bool(more or fresh)
        return places, BlockTableUpdates(
            np.concatenate(entries), np.concatenate(blocks), places[fresh], params, current, beyond
        )

    def apply(self, entries: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> None:
        """Put deltas, which are on the device now, in place."""
        if len(entries):
            self.tables.view(-1).index_put_((entries,), blocks)
        if len(rows):
            self.params.index_put_((rows,), params.view(-1, PARAMS))

    def _enter(self, requests: Sequence[Request], rows: list[int], fresh: Sequence[int]) -> None:
        """Give rows to new requests; where there are none left, those that are not in this step lose theirs."""
        if len(requests) > self.num_rows:
            raise InvalidInputError("step", f"at most {self.num_rows} requests (max_num_seqs)", len(requests))
        if len(fresh) > len(self._free):
            here = {*requests}
            for request in [request for request in self._row_of if request not in here]:
                row = self._row_of.pop(request)
                self._lists[row] = None
                self._free.append(row)
        for at in fresh:
            request, row = requests[at], self._free.pop()
            rows[at] = self._row_of[request] = row
            sampling = request.sampling
            self.special[row] = has_penalty(sampling) or sampling.min_tokens > 0 or sampling.logprobs is not None

    def _current_blocks(
        self, requests: Sequence[Request], rows: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """The block of each request's first new token; and entries and blocks where the device has another one."""
        entries, blocks = [], []
        every = np.empty((len(self.block_sizes), len(requests)), dtype=np.int32)
        _, per_group, columns = self.sent.shape
        for group, size in enumerate(self.block_sizes):
            at = starts // size
            tables = [request.block_ids[group] for request in requests]
            every[group] = [table[i] for table, i in zip(tables, at.tolist(), strict=True)]
            current = every[group]
            changed = np.flatnonzero(self.sent[group, rows, at] != current)
            self.sent[group, rows[changed], at[changed]] = current[changed]
            entries.append((group * per_group + rows[changed]) * columns + at[changed])
            blocks.append(current[changed])
        return every, entries, blocks

    def _send(
        self, request: Request, row: int, first: int, end: int, entries: list[np.ndarray], blocks: list[np.ndarray]
    ) -> None:
        """The blocks of the tokens from `first` to `end`."""
        _, per_group, columns = self.sent.shape
        for group, size in enumerate(self.block_sizes):
            begin, stop = first // size, -(-end // size)
            new = np.array(request.block_ids[group][begin:stop], dtype=np.int32)
            self.sent[group, row, begin:stop] = new
            entries.append(np.arange(begin, stop, dtype=np.int32) + (group * per_group + row) * columns)
            blocks.append(new)
