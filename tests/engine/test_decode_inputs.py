"""The kernel that writes what a captured step reads, against the torch path that steps on the CPU take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedattn import CommonAttentionMetadata
from pagedattn.engine import KVGroup
from pagedattn.engine.worker.decode_inputs import DecodeRows, packed_decodes, tables_of, write_decodes
from pagedattn.engine.worker.device_batch import BatchSender
from pagedattn.engine.worker.host_batch import BlockMoves, HostBatch
from pagedattn.engine.worker.kernels.decode_inputs import write
from pagedattn.engine.worker.persistent_batch import BlockTableUpdates, PersistentBatch
from pagedattn.testing import interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not interpreted() and DEVICE.type == "cpu", reason="needs a GPU or the interpreter")
GROUPS, LONGEST, NUM_ROWS = [KVGroup(4), KVGroup(16)], 1024, 9
OPEN = [KVGroup(16), KVGroup(16, recent_blocks=7)]


def packed(count: int, groups: list[KVGroup] = GROUPS) -> HostBatch:
    """Decodes at positions from the first of a table to its last, every other token unread."""
    draw = np.random.default_rng(count)
    starts = np.array([0, LONGEST - 1, 15, 16, 700, 3][:count], dtype=np.int32)
    tokens = np.where(np.arange(count) % 2, -1, draw.integers(0, 99, count)).astype(np.int32)
    rows = draw.permutation(NUM_ROWS)[:count].astype(np.int32)
    none = np.zeros(0, dtype=np.int32)
    current = draw.integers(1, 5000, (len(groups), count), dtype=np.int32)
    updates = BlockTableUpdates(none, none, none, np.zeros((0, 6), dtype=np.int32), current, False)
    moves, shared = BlockMoves(*[none] * 4), [0 for group in groups if group.recent_blocks is None]
    return HostBatch(tokens, starts, starts + 1, rows, np.arange(count), updates, count, shared, None, moves)


def buffers(size: int, width: int, groups: list[KVGroup]) -> tuple[DecodeRows, list[CommonAttentionMetadata]]:
    def junk(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device=DEVICE)

    common_by_group = [
        CommonAttentionMetadata(
            query_start_loc=junk(size + 1),
            seq_lens=junk(size),
            block_table=junk(size, width),
            slot_mapping=junk(size, dtype=torch.int64),
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=LONGEST,
            recent_table=junk(size, width) if groups is OPEN else None,
        )
        for group in groups
        if group.recent_blocks is None
    ]
    return DecodeRows(*(junk(size) for _ in range(4))), common_by_group


def test_a_step_says_which_blocks_its_groups_have() -> None:
    cpu = torch.device("cpu")
    common_by_group = BatchSender(PersistentBatch(GROUPS, NUM_ROWS, LONGEST, cpu), cpu).send(packed(2)).common_by_group
    assert [common_by_group[group].block_size for group in range(len(GROUPS))] == [group.block_size for group in GROUPS]


def test_a_step_has_the_table_of_blocks_that_are_not_full() -> None:
    cpu, step = torch.device("cpu"), packed(4, OPEN)
    state = PersistentBatch(OPEN, NUM_ROWS, LONGEST, cpu)
    state.tables.copy_(torch.arange(state.tables.numel()).view_as(state.tables))
    (common,) = BatchSender(state, cpu).send(step).common_by_group.values()
    for found, own in ((common.block_table, state.tables[0]), (common.recent_table, state.tables[1])):
        assert found is not None and torch.equal(found, own[torch.from_numpy(step.rows), : found.shape[1]])
    (plain, _) = (
        BatchSender(PersistentBatch(GROUPS, NUM_ROWS, LONGEST, cpu), cpu).send(packed(2)).common_by_group.values()
    )
    assert plain.recent_table is None


@pytest.mark.parametrize("groups", [GROUPS, OPEN], ids=["layers", "open"])
@pytest.mark.parametrize(("count", "size"), [(6, 8), (1, 1), (2, 8), (6, 6)])
def test_the_kernel_writes_what_torch_writes(count: int, size: int, groups: list[KVGroup]) -> None:
    step, found = packed(count, groups), []
    for path in ("torch", "triton"):
        state = PersistentBatch(groups, NUM_ROWS, LONGEST, torch.device("cpu") if path == "torch" else DEVICE)
        draw = torch.Generator().manual_seed(1)
        state.tables.copy_(torch.randint(1, 5000, state.tables.shape, generator=draw))
        state.last_tokens.copy_(torch.randint(-1, 99, state.last_tokens.shape, generator=draw))
        rows, common_by_group = buffers(size, state.tables.shape[2], groups)
        if path == "torch":
            rows = DecodeRows(*(one.cpu() for one in rows))
            names = ("query_start_loc", "seq_lens", "block_table", *(("recent_table",) if groups is OPEN else ()))
            common_by_group = [
                one.replace(**{name: getattr(one, name).cpu() for name in names}) for one in common_by_group
            ]
            write_decodes(
                packed_decodes(step, size, NUM_ROWS, torch.device("cpu")), count, state, rows, common_by_group
            )
        else:
            sent = packed_decodes(step, size, NUM_ROWS, DEVICE)
            for group, (common, out) in enumerate(tables_of(common_by_group)):
                table, block_size = state.tables[group], groups[group].block_size
                write(sent, group, count, table, block_size, state.last_tokens, rows, common, out)
        found.append((state, rows, common_by_group))
    (plain, rows, common_by_group), (state, got_rows, got_commons) = found
    for got, wanted in zip(got_rows, rows, strict=True):
        assert torch.equal(got.cpu(), wanted)
    assert (rows.ids >= 0).all() and (rows.state_rows[count:] == NUM_ROWS).all()
    assert torch.equal(state.tables.cpu(), plain.tables), "the new block is in the table, and nothing else"
    tables = zip(tables_of(got_commons), tables_of(common_by_group), groups, strict=True)
    for (got, found_table), (wanted, table), group in tables:
        for name in ("query_start_loc", "seq_lens"):
            assert torch.equal(getattr(got, name).cpu(), getattr(wanted, name)), name
        for row, start in enumerate(step.starts):
            used = start // group.block_size + 1
            assert torch.equal(found_table[row, :used].cpu(), table[row, :used])
    assert (common_by_group[0].seq_lens[count:] == 0).all()
    assert common_by_group[0].query_start_loc[-1] == count
