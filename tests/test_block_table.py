"""BlockTable: rows staged on the host arrive on the device as a plain model of them says."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pagedattn import BlockTable, ops
from pagedattn.errors import CapacityError, InvalidInputError


def live(table: BlockTable, device_table: torch.Tensor) -> list[list[int]]:
    return [device_table[row, : table.lengths[row]].tolist() for row in range(len(device_table))]


def test_rows_are_added_appended_moved_and_cleared() -> None:
    table = BlockTable(max_rows=4, max_blocks=5)
    table.add_row(0, [3, 4])
    table.append_row(0, [9])
    table.add_row(1, [7])
    table.add_row(1, [8, 6])
    table.move(1, 2)
    assert [table.row(row) for row in range(4)] == [[3, 4, 9], [], [8, 6], []]
    device_table = table.commit()
    assert device_table.dtype == torch.int32 and device_table.shape == (4, 5)
    assert live(table, device_table) == [[3, 4, 9], [], [8, 6], []]
    table.clear(0)
    assert table.row(0) == [] and table.commit()[0].tolist() == [0] * 5


def test_nothing_reaches_the_device_before_commit() -> None:
    table = BlockTable(max_rows=2, max_blocks=3)
    table.add_row(0, [1, 2, 3])
    assert not table.device_table.any()
    assert table.commit().data_ptr() == table.device_table.data_ptr()
    assert table.device_table[0].tolist() == [1, 2, 3]


def test_commit_copies_the_rows_asked_for() -> None:
    table = BlockTable(max_rows=3, max_blocks=2)
    for row in range(3):
        table.add_row(row, [row + 1])
    assert table.commit(2).tolist() == [[1, 0], [2, 0]]
    assert not table.device_table[2].any()
    assert table.commit()[2].tolist() == [3, 0], "what was left is sent later"
    assert table.commit(0).shape == (0, 2)


def test_random_changes_arrive() -> None:
    rng, table, model = random.Random(5), BlockTable(max_rows=6, max_blocks=8), [[] for _ in range(6)]
    moves = 0
    for _ in range(2000):
        row, other = rng.sample(range(6), 2)
        blocks = [rng.randrange(1, 2**31 - 1) for _ in range(rng.randrange(4))]
        match rng.choice(("add", "append", "move", "clear", "commit")):
            case "add":
                table.add_row(row, blocks)
                model[row] = blocks
            case "append" if len(model[row]) + len(blocks) <= 8:
                table.append_row(row, blocks)
                model[row] = model[row] + blocks
            case "move":
                table.move(row, other)
                model[row], model[other] = [], model[row]
                moves += bool(model[other])
            case "clear":
                table.clear(row)
                model[row] = []
            case "commit":
                assert live(table, table.commit()) == model
        assert [table.row(index) for index in range(6)] == model
    assert moves > 100


def test_a_row_that_outgrows_the_table_is_refused_and_keeps_what_it_had() -> None:
    table = BlockTable(max_rows=1, max_blocks=3)
    table.add_row(0, [1, 2])
    with pytest.raises(CapacityError, match="row 0 needs 4 blocks, the table holds 3; raise max_blocks"):
        table.append_row(0, [3, 4])
    with pytest.raises(CapacityError, match="row 0 needs 4 blocks"):
        table.add_row(0, [1, 2, 3, 4])
    assert table.row(0) == [1, 2]


@pytest.mark.parametrize("name", ["max_rows", "max_blocks", "block_size"])
def test_a_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be at least 1, got 0"):
        BlockTable(**{"max_rows": 1, "max_blocks": 1, "block_size": 1, name: 0})  # type: ignore[arg-type]


def test_tables_of_groups_are_slices_of_one_tensor_and_are_mapped_in_one_launch() -> None:
    tables = BlockTable.for_groups([4, 8], max_rows=2, max_blocks=3)
    tables[0].add_row(0, [5, 6])
    tables[1].add_row(0, [7])
    assert [table.block_size for table in tables] == [4, 8]
    for table in tables:
        table.commit()
    stacked = tables[0].device_table.as_strided((2, 2, 3), (6, 3, 1))
    assert stacked[1].data_ptr() == tables[1].device_table.data_ptr()
    slots = torch.empty(2, 2, dtype=torch.int64)
    ops.compute_slot_mapping(
        stacked[:, :1], [4, 8], torch.tensor([0, 2], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), slots
    )
    assert slots.tolist() == [[6 * 4, 6 * 4 + 1], [7 * 8 + 4, 7 * 8 + 5]]


def test_lengths_are_host_integers() -> None:
    table = BlockTable(max_rows=2, max_blocks=2)
    table.add_row(1, [4, 5])
    assert isinstance(table.lengths, np.ndarray) and table.lengths.tolist() == [0, 2]


def test_a_row_moved_to_itself_is_kept() -> None:
    table = BlockTable(max_rows=2, max_blocks=3)
    table.add_row(1, [4, 5])
    table.move(1, 1)
    assert table.row(1) == [4, 5]


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_outside_the_table_is_refused(row: int) -> None:
    with pytest.raises(InvalidInputError, match="row"):
        BlockTable(max_rows=2, max_blocks=3).add_row(row, [1])


def test_only_what_changed_is_sent() -> None:
    tables = BlockTable.for_groups([4, 8], max_rows=3, max_blocks=4)
    tables[1].add_row(1, [7, 8, 9])
    tables[1].append_row(1, [6])
    entries, blocks = tables[1].take_changes()
    assert entries.tolist() == [12 + 4, 12 + 5, 12 + 6, 12 + 7] and blocks.tolist() == [7, 8, 9, 6]
    tables[1].add_row(1, [7, 5])
    tables[1].put(np.array([0, 1]), np.array([3, 1]), np.array([1, 4], dtype=np.int32))
    entries, blocks = tables[1].take_changes()
    assert [*zip(entries.tolist(), blocks.tolist(), strict=True)] == [(17, 4), (15, 1), (17, 4)]
    tables[1].forget()
    tables[1].add_row(1, [7])
    assert [one.tolist() for one in tables[1].take_changes()] == [[16], [7]]
    assert not tables[0].take_changes()[0].size
