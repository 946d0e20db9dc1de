"""FLASHINFER: steps captured for a CUDA graph, and the workspace that builders share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_on_cpu import DECODES, ENDS, HALF, MIXED, attend, builder_of, install, written

from pagedattn.backends.base import Limits
from pagedattn.backends.flashinfer import plan
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError
from pagedattn.testing.case import Case


@pytest.fixture(autouse=True, params=ENDS)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, request.param)


CAPTURED = Case(**HALF, query_lens=(1, 1, 1, 1), seq_lens=(40, 9, 64, 30))


@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
@pytest.mark.parametrize("window", [None, 24])
def test_a_captured_step_is_planned_again_in_its_own_buffers(heads: tuple[int, int], window: int | None) -> None:
    case = CAPTURED.but(heads=heads, sliding_window=window)
    big, small = written(case), written(case.but(query_lens=(1, 1), seq_lens=(3, 50)), seed=1)
    padded = written(case.but(query_lens=(1, 1, 1, 0), seq_lens=(3, 50, 16, 0)), seed=2)
    builder = builder_of(big)
    metadata = builder.build(big.common, capture=True)
    attend(big, metadata)
    (part,) = metadata.parts(16)
    buffers = [one.data_ptr() for one in part.slot.wrapper.buffers]
    statics = {name: getattr(metadata.common, name) for name in ("query_start_loc", "seq_lens", "slot_mapping")}
    for problem in (small, padded, big):
        assert builder.build(problem.common, into=metadata) is metadata
        count = problem.common.num_seqs
        rows = torch.nn.functional.pad(problem.query, (0, 0, 0, 0, 0, 4 - len(problem.query)))
        attend(problem, metadata, rows)
        assert [one.data_ptr() for one in part.slot.wrapper.buffers] == buffers
        assert all(getattr(metadata.common, name) is one for name, one in statics.items())
        assert (
            torch.equal(statics["seq_lens"][:count], problem.common.seq_lens) and not statics["seq_lens"][count:].any()
        )
        assert int(statics["query_start_loc"][4]) == len(problem.query)
        slots = problem.common.slot_mapping
        assert torch.equal(statics["slot_mapping"][: len(slots)], slots)
        assert bool((statics["slot_mapping"][len(slots) :] == -1).all())
    assert "4 sequences (captured)" in metadata.describe()
    with pytest.raises(InvalidInputError, match="query must be at least 4 rows"):
        attend(small, metadata)


def test_other_builds_leave_a_captured_plan_alone(fake: Any) -> None:
    captured, eager = written(CAPTURED), written(DECODES, seed=1)
    builder = builder_of(captured)
    metadata = builder.build(captured.common, capture=True)
    attend(eager, builder.build(eager.common))
    before = fake.plans
    attend(captured, metadata)
    assert fake.plans == before
    with pytest.raises(InvalidInputError, match="blocks of 16 tokens, as captured"):
        metadata.parts(8)


def test_what_cannot_be_captured_or_does_not_fit_is_an_error() -> None:
    problem, mixed = written(CAPTURED), written(MIXED)
    builder = builder_of(problem)
    for common in (mixed.common, written(CAPTURED.but(query_lens=(1, 0, 1, 1))).common):
        with pytest.raises(UnsupportedError, match="captures decodes only"):
            builder.build(common, capture=True)
    metadata = builder.build(problem.common, capture=True)
    with pytest.raises(UnsupportedError, match="captures decodes only"):
        builder.build(mixed.common, into=metadata)
    with pytest.raises(CapacityError, match="num_seqs is 5, but the captured metadata holds at most 4"):
        builder.build(written(CAPTURED.but(query_lens=(1,) * 5, seq_lens=(9,) * 5)).common, into=metadata)
    with pytest.raises(CapacityError, match="number of blocks is 40"):
        builder.build(written(CAPTURED.but(query_lens=(1, 1), seq_lens=(320, 320))).common, into=metadata)
    with pytest.raises(InvalidInputError, match="capture=True"):
        builder.build(problem.common, into=builder.build(problem.common))
    attend(problem, metadata)


def test_limits_say_how_many_blocks_a_captured_list_holds() -> None:
    short, long = written(CAPTURED), written(CAPTURED.but(seq_lens=(320, 300, 1, 1)), seed=1)
    builder = builder_of(short, limits=Limits(max_seqs=4, max_tokens=4, max_blocks_per_seq=20))
    metadata = builder.build(short.common, capture=True)
    builder.build(long.common, into=metadata)
    attend(long, metadata)
    assert metadata.common.max_seq_len == 320 and metadata.common.block_table.shape == (4, 20)


def test_builders_share_a_workspace_that_grows(fake: Any) -> None:
    problem = written(MIXED)
    builders = [builder_of(problem), builder_of(problem)]
    metadata = [builder.build(problem.common) for builder in builders]
    (shared,) = plan._shared.values()
    first = shared.buffer
    assert first.numel() == 1 << 20 and metadata[0].parts(16)[0].slot.wrapper.workspace is first
    fake.needs_bytes = 5 << 20
    attend(problem, builders[0].build(problem.common))
    assert shared.buffer.numel() == 8 << 20 and not shared.buffer.any()
    again = builders[1].build(problem.common)
    attend(problem, again)
    assert {id(part.slot.wrapper.workspace) for part in again.parts(16)} == {id(shared.buffer)}
    fake.needs_bytes = 3 << 30
    with pytest.raises(CapacityError, match=r"needs 322\d+ bytes for this step, workspaces end at 2147483648"):
        builders[0].build(problem.common)
    fake.needs_bytes = 0
    attend(problem, builders[0].build(problem.common))


def test_a_given_workspace_is_used_and_never_replaced(fake: Any) -> None:
    problem = written(MIXED)
    own = torch.ones(4096, dtype=torch.uint8)
    builder = builder_of(problem, workspace=own)
    metadata = builder.build(problem.common)
    attend(problem, metadata)
    assert metadata.parts(16)[0].slot.wrapper.workspace is own and not own.any() and not plan._shared
    fake.needs_bytes = 5000
    with pytest.raises(CapacityError, match=r"workspace has 4096 bytes, FlashInfer needs at least 50\d\d"):
        builder.build(problem.common)
    with pytest.raises(InvalidInputError, match="contiguous uint8"):
        builder_of(problem, workspace=torch.ones(8))
    with pytest.raises(InvalidInputError, match="workspace must be aligned to 16 bytes, got an address of 8 modulo 16"):
        builder_of(problem, workspace=torch.zeros(4096, dtype=torch.uint8)[8:])


def test_a_captured_workspace_stays_where_it_is(fake: Any) -> None:
    problem = written(CAPTURED)
    builder = builder_of(problem)
    fake.needs_bytes = 3 << 20
    metadata = builder.build(problem.common, capture=True)
    (part,) = metadata.parts(16)
    held = part.slot.wrapper.workspace
    assert held.numel() == 4 << 20
    fake.needs_bytes = 6 << 20
    with pytest.raises(CapacityError, match=r"the captured workspace has 4194304 bytes, this step needs 6\d+"):
        builder.build(problem.common, into=metadata)
    builder.build(problem.common)
    fake.needs_bytes = 0
    builder.build(problem.common, into=metadata)
    attend(problem, metadata)
    assert part.slot.wrapper.workspace is held
