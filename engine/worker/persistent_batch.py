"""PersistentBatch: what steps need of each request, kept on the device and sent only where it changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedattn import BlockTable
from pagedattn.errors import InvalidInputError

from ..kv_group import KVGroup, groups_of_layers
from ..request import Request
from ..sampling.metadata import needs_processing
from ..sampling.packed_params import PARAMS, request_params


class BlockTableUpdates(NamedTuple):
    """What changed since the last step: entries of the flattened block tables, and rows of parameters."""

    entries: np.ndarray  # [k] int32
    blocks: np.ndarray  # [k] int32
    rows: np.ndarray  # [m] int32
    params: np.ndarray  # [m, PARAMS] int32
    current: np.ndarray  # [groups, n] int32, the block of each request's first new token
    table_changed: bool  # whether more changed than such blocks

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
        self.num_layer_groups = len(groups_of_layers(groups))  # behind which the table of blocks that are not full is
        widest = -(-max_model_len // min(self.block_sizes))
        self.block_tables = BlockTable.for_groups(self.block_sizes, num_rows + 1, widest, device)
        self.tables = self.block_tables[0].stacked  # [groups, rows, widest]
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.params = torch.zeros(num_rows + 1, PARAMS, dtype=torch.int32, device=device)
        # On the host: whose rows need more than one pass over their logits.
        self.needs_processing = np.zeros(num_rows + 1, dtype=bool)
        self.forget()

    def forget(self) -> None:
        """Give up all rows: after a failed step it is not known what reached the device."""
        for table in self.block_tables:
            table.forget()
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
        row_indices = np.array(rows, dtype=np.int32)
        current = self._put_current_blocks(requests, row_indices, starts)
        for at in moved:
            lists[rows[at]] = requests[at].block_ids
        whole = {*moved}
        more = sorted({*moved, *np.flatnonzero(ends - starts > 1).tolist()})
        for at in more:
            self._put_blocks(requests[at], rows[at], 0 if at in whole else int(starts[at]), int(ends[at]))
        entries, blocks = zip(*(table.take_changes() for table in self.block_tables), strict=True)
        params = request_params([requests[at] for at in fresh])
        table_changed = bool(more or fresh)
        return row_indices, BlockTableUpdates(
            np.concatenate(entries), np.concatenate(blocks), row_indices[fresh], params, current, table_changed
        )

    def apply(self, entries: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> None:
        """Put updates, which are on the device now, in place."""
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
            self.needs_processing[row] = needs_processing(request.sampling)

    def _put_current_blocks(self, requests: Sequence[Request], rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Put the block of each request's first new token into the tables; returns these, [groups, n]."""
        every = np.empty((len(self.block_sizes), len(requests)), dtype=np.int32)
        for group, table in enumerate(self.block_tables):
            at = starts // table.block_size
            ids = [request.block_ids[group] for request in requests]
            every[group] = [blocks[i] for blocks, i in zip(ids, at.tolist(), strict=True)]
            table.put(rows, at, every[group])
        return every

    def _put_blocks(self, request: Request, row: int, first: int, end: int) -> None:
        """Put the blocks of the tokens from `first` to `end` into the tables."""
        for group, table in enumerate(self.block_tables):
            begin, stop = first // table.block_size, -(-end // table.block_size)
            table.put_span(row, begin, np.array(request.block_ids[group][begin:stop], dtype=np.int32))
