"""BlockTable: rows of block ids staged on the host and committed to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import CapacityError, InvalidInputError


class BlockTable:
    """One KV group's block table: [max_rows, max_blocks] int32 on the host, copied to the device by `commit`.

    Rows change by whole blocks only, so most steps touch few of them. Entries past a row's length are left over from
    earlier rows and are never followed.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int = 16,
        device: torch.device | str | None = None,
        *,
        _device_table: torch.Tensor | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_blocks", max_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidInputError(name, "at least 1", value)
        if _device_table is None:
            _device_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.block_size = block_size
        self.device_table = _device_table
        self._staging = _Staging(max_rows, _device_table.shape[1], _device_table.is_cuda)
        self._capacity = max_blocks
        self.lengths = np.zeros(max_rows, dtype=np.int32)

    @classmethod
    def for_groups(
        cls, block_sizes: Sequence[int], max_rows: int, max_blocks: int, device: torch.device | str | None = None
    ) -> list[BlockTable]:
        """One table per KV group, as slices of one [G, max_rows, max_blocks] tensor."""
        stacked = torch.zeros(len(block_sizes), max_rows, max_blocks, dtype=torch.int32, device=device)
        return [cls(max_rows, max_blocks, size, _device_table=stacked[group]) for group, size in enumerate(block_sizes)]

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
        if end > self._capacity:
            raise CapacityError(f"row {row} needs {end} blocks, the table holds {self._capacity}; raise max_blocks")
        self._staging.writable()[row, start:end] = blocks
        self.lengths[row] = end

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes a copy of row `source`, which is cleared."""
        self._check_row(source)
        self._check_row(target)
        if source == target:
            return
        host = self._staging.writable()
        host[target] = host[source]
        self.lengths[target] = self.lengths[source]
        self.clear(source)

    def clear(self, row: int) -> None:
        """Row `row` becomes empty (block 0 throughout, so that padding reads a real block)."""
        self._check_row(row)
        self._staging.writable()[row] = 0
        self.lengths[row] = 0

    def row(self, row: int) -> list[int]:
        """The blocks of row `row`."""
        return self._staging.host[row, : self.lengths[row]].tolist()

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise InvalidInputError("row", f"in [0, {len(self.lengths)})", row)

    def commit(self, num_rows: int | None = None) -> torch.Tensor:
        """Copy the first `num_rows` rows (all where None) to the device; returns that part [num_rows, max_blocks]."""
        rows = len(self.lengths) if num_rows is None else num_rows
        used = max(1, int(self.lengths[:rows].max(initial=0)))
        self._staging.copy_to(self.device_table, rows, used)
        return self.device_table[:rows]


class _Staging:
    """A host buffer that is not written again before its last copy to the device was read."""

    def __init__(self, rows: int, columns: int, pinned: bool) -> None:
        self.tensor = torch.zeros(rows, columns, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.host = self.tensor.numpy()
        self._copied: torch.cuda.Event | None = None

    def writable(self) -> np.ndarray:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self.host

    def copy_to(self, target: torch.Tensor, rows: int, columns: int) -> None:
        target[:rows, :columns].copy_(self.tensor[:rows, :columns], non_blocking=True)
        if target.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(target.device))
