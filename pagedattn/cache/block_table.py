"""BlockTable: rows of block ids kept on the host, of which the device is sent what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import CapacityError, InvalidInputError


class BlockTable:
    """One KV group's block table: [max_rows, max_blocks] int32 on the host, whose changes `commit` sends to the device.

    Rows change by whole blocks only, so most steps send few entries. Entries past a row's length are left over from
    earlier rows and are never followed.

    Attributes:
        host: [max_rows, max_blocks] int32, what the device has after the next commit; not to be written to.
        device_table: [max_rows, max_blocks] int32 on the device.
        lengths: [max_rows] int32, blocks of each row that `add_row` and `append_row` gave it.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int = 16,
        device: torch.device | str | None = None,
        *,
        _group: int = 0,
        _stacked: torch.Tensor | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_blocks", max_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidInputError(name, "at least 1", value)
        if _stacked is None:
            _stacked = torch.zeros(1, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.block_size = block_size
        self.stacked = _stacked
        self.device_table = _stacked[_group]
        self.host = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.lengths = np.zeros(max_rows, dtype=np.int32)
        self._first = _group * self.host.size  # of its entries among those of all groups
        self._changed: list[np.ndarray] = []

    @classmethod
    def for_groups(
        cls, block_sizes: Sequence[int], max_rows: int, max_blocks: int, device: torch.device | str | None = None
    ) -> list[BlockTable]:
        """One table per KV group, as slices of one [G, max_rows, max_blocks] tensor, the `stacked` of each."""
        stacked = torch.zeros(len(block_sizes), max_rows, max_blocks, dtype=torch.int32, device=device)
        sizes = enumerate(block_sizes)
        return [cls(max_rows, max_blocks, size, _group=group, _stacked=stacked) for group, size in sizes]

    def add_row(self, row: int, blocks: Sequence[int]) -> None:
        """Row `row` becomes `blocks`.

        Raises:
            CapacityError: more than the table holds; the row stays as it is.
        """
        self._check_row(row)
        self._write(row, 0, blocks)

    def append_row(self, row: int, blocks: Sequence[int]) -> None:
        """Blocks are added at the end of row `row`.

        Raises:
            CapacityError: the row would outgrow the table.
        """
        self._check_row(row)
        self._write(row, int(self.lengths[row]), blocks)

    def _write(self, row: int, start: int, blocks: Sequence[int]) -> None:
        end = start + len(blocks)
        if end > self.host.shape[1]:
            most = self.host.shape[1]
            raise CapacityError(f"row {row} needs {end} blocks, the table holds {most}; raise max_blocks")
        self.put_span(row, start, np.array(blocks, dtype=np.int32))
        self.lengths[row] = end

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes a copy of row `source`, which is cleared."""
        self._check_row(source)
        self._check_row(target)
        if source == target:
            return
        self.put_span(target, 0, self.host[source])
        self.lengths[target] = self.lengths[source]
        self.clear(source)

    def clear(self, row: int) -> None:
        """Row `row` becomes empty (block 0 throughout, so that padding reads a real block)."""
        self._check_row(row)
        self.put_span(row, 0, np.zeros(self.host.shape[1], dtype=np.int32))
        self.lengths[row] = 0

    def row(self, row: int) -> list[int]:
        """The blocks of row `row`."""
        return self.host[row, : self.lengths[row]].tolist()

    def put(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        """Entries (rows[i], columns[i]) become blocks[i], each [k] and no entry twice; lengths stay as they are.

        This and `put_span` are for those who keep lengths of their own, and check nothing.
        """
        at = rows * self.host.shape[1] + columns
        flat = self.host.reshape(-1)
        changed = np.flatnonzero(flat[at] != blocks)
        if len(changed):
            at = at[changed]
            flat[at] = blocks[changed]
            self._changed.append(at)

    def put_span(self, row: int, first: int, blocks: np.ndarray) -> None:
        """The entries of a row from `first` on become `blocks` [k]; its length stays as it is."""
        span = self.host[row, first : first + len(blocks)]
        changed = np.flatnonzero(span != blocks)
        if len(changed):
            span[:] = blocks
            self._changed.append(changed + (row * self.host.shape[1] + first))

    def forget(self) -> None:
        """Take it for unknown what the device has: all that is put from now on is sent."""
        self.host.fill(-1)
        self.lengths.fill(0)
        self._changed.clear()

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """What changed since the last call or commit, for a transfer of one's own: int32 [k] entries of the flattened
        `stacked`, and their blocks."""
        at = np.concatenate([np.zeros(0, dtype=np.int64), *self._changed])
        self._changed.clear()
        return (at + self._first).astype(np.int32), self.host.reshape(-1)[at]

    def commit(self, num_rows: int | None = None) -> torch.Tensor:
        """Send what changed in the first `num_rows` rows (all where None); returns them [num_rows, max_blocks]."""
        rows = len(self.lengths) if num_rows is None else num_rows
        entries, blocks = self.take_changes()
        here = entries < self._first + rows * self.host.shape[1]
        if not here.all():
            self._changed.append(entries[~here] - self._first)
        if here.any():
            sent = torch.from_numpy(np.stack((entries[here], blocks[here])))
            sent = sent.pin_memory() if self.stacked.is_cuda else sent  # else the transfer waits for the device
            where, what = sent.to(self.stacked.device, non_blocking=True)
            self.stacked.view(-1).index_put_((where,), what)
        return self.device_table[:rows]

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise InvalidInputError("row", f"in [0, {len(self.lengths)})", row)
