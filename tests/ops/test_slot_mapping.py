from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.testing.op_oracles import slot_mapping_oracle


def _run(device, path, sizes, query_lens, seq_lens, tail=3, rows=None, **parallel):
    columns = 9
    tables = torch.randint(0, 2**20, (len(sizes), 6, columns), dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    room = torch.full((len(sizes), sum(query_lens) + tail + 1), -77, dtype=torch.int64, device=device)
    slots = room[:, :-1]  # rows that lie apart
    ops.compute_slot_mapping(
        tables.to(device),
        sizes,
        starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        slots,
        rows=None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device),
        path=path,
        **parallel,
    )
    want = slot_mapping_oracle(tables.tolist(), sizes, query_lens, seq_lens, slots.shape[1], rows, **parallel)
    assert torch.equal(slots.cpu(), want) and (room[:, -1] == -77).all()
    return want


@pytest.mark.parametrize("sizes", [[16], [4, 16], [1, 3, 256]])
def test_groups(device, path, sizes) -> None:
    want = _run(device, path, sizes, [3, 0, 1, 7], [3, 0, 4, 9])
    assert (want >= 0).any() and (want[:, -3:] == -1).all()


def test_rows_point_into_the_table(device, path) -> None:
    _run(device, path, [4], [2, 3], [8, 3], rows=[5, 1])


def test_past_the_table_is_skipped(device, path) -> None:
    assert (_run(device, path, [2], [4], [20])[0, :4].tolist())[-2:] == [-1, -1]


def test_before_the_first_position_is_skipped(device, path) -> None:
    assert (_run(device, path, [4], [5], [3])[0, :3] >= 0).tolist() == [False, False, True]


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 4), (4, 2), (3, 1)])
def test_context_parallel_ranks_partition_the_tokens(device, path, world, interleave) -> None:
    owned = 0
    for rank in range(world):
        want = _run(device, path, [8], [9, 30], [9, 41], tail=0, world=world, rank=rank, interleave=interleave)
        owned += int((want >= 0).sum())
    assert owned == 39


def test_fewer_slots_than_tokens(device, path) -> None:
    tables = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    slots = torch.full((5,), -77, dtype=torch.int64, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9], [9]))
    ops.compute_slot_mapping(tables, 4, starts, lens, slots, path=path)
    assert slots.tolist() == [0, 1, 2, 3, 4]


def test_no_sequences(device, path) -> None:
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    ops.compute_slot_mapping(torch.zeros(0, 1, dtype=torch.int32, device=device), 4, start, empty, slots, path=path)
    assert slots.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "rows"])
@pytest.mark.parametrize("change", ["column", "int64", "longer"])
def test_what_the_kernel_would_read_otherwise_is_refused(device, path, name, change) -> None:
    def i32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    given: dict[str, Any] = {"query_start_loc": i32(0, 2, 3), "seq_lens": i32(2, 5), "rows": i32(1, 0)}
    bad = given[name]
    changed = {"column": torch.stack((bad, bad), 1)[:, 0], "int64": bad.long(), "longer": torch.cat((bad, bad))}
    given[name] = changed[change]
    table, slots = torch.zeros(2, 2, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    lens = "query_start_loc" if name == "seq_lens" and change == "longer" else name  # whose length says which is wrong
    with pytest.raises(InvalidInputError, match=rf"^{lens} must be int32 \[\d\] on {device}.*, contiguous"):
        ops.compute_slot_mapping(table, 4, slot_mapping=slots, path=path, **given)


def test_a_transposed_table_is_refused(device, path) -> None:
    table = torch.zeros(5, 2, dtype=torch.int32, device=device).t()
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 3], [2, 5]))
    with pytest.raises(InvalidInputError, match=r"^block_tables must be contiguous in each row"):
        ops.compute_slot_mapping(table, 4, starts, lens, torch.zeros(3, dtype=torch.int64, device=device), path=path)


def test_wrong_dtype_is_refused(device) -> None:
    table = torch.zeros(1, 1, dtype=torch.int64, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(InvalidInputError, match="block_tables must be int32"):
        ops.compute_slot_mapping(table, 4, lens, lens, torch.zeros(1, dtype=torch.int64, device=device))
