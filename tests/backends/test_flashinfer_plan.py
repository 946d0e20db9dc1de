"""FLASHINFER plans: what reaches the wrappers, when they are planned, and what they are planned again for."""

from __future__ import annotations

import logging
import math
from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_on_cpu import CPU, DECODES, ENDS, HALF, MIXED, OnCpu, attend, builder_of, install, written

from pagedattn import AttentionCall, CommonAttentionMetadata
from pagedattn.backends.flashinfer import pages as flashinfer_pages
from pagedattn.backends.flashinfer.pages import Lengths, page_lists
from pagedattn.errors import CapacityError, InvalidInputError
from pagedattn.testing.case import Case


@pytest.fixture(autouse=True, params=ENDS)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, request.param)


def lengths(queries: list[int], keys: list[int]) -> Lengths:
    return Lengths(torch.tensor(queries, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32))


def test_pages_are_those_of_the_keys_that_some_query_sees() -> None:
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    batch = lengths([1, 0, 6], [17, 30, 32])
    pages = page_lists(batch, table, 4, cut_surplus=True, window=None)
    assert pages.indices.tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19, 20, 21, 22, 23]
    assert pages.indptr.tolist() == [0, 5, 5, 13] and pages.query_start_loc.tolist() == [0, 1, 1, 7]
    assert pages.seq_lens.tolist() == [17, 0, 32] and pages.last_page_len.tolist()[::2] == [1, 4]
    seen = page_lists(batch, table, 4, cut_surplus=True, window=5)
    # The first query of sequence 2 stands at 26 and sees 22..26: page 5 is its first, and the page's slots 20 and 21.
    assert seen.indices.tolist() == [3, 4, 21, 22, 23] and seen.seq_lens.tolist() == [5, 0, 12]
    assert all(one.dtype == torch.int32 for one in seen)


def test_rows_before_the_first_key_are_a_sequence_of_their_own() -> None:
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    pages = page_lists(lengths([5, 2], [3, 9]), table, 4, cut_surplus=True, window=None)
    assert pages.query_start_loc.tolist() == [0, 2, 5, 5, 7] and pages.seq_lens.tolist() == [0, 3, 0, 9]
    assert pages.indices.tolist() == [0, 8, 9, 10]
    for window in (None, 7):
        problem = written(
            Case(**HALF, query_lens=(90, 3), seq_lens=(80, 40), write=False, sliding_window=window), seed=3
        )
        attend(problem, builder_of(problem).build(problem.common))


def test_a_table_too_narrow_for_its_lengths_is_an_error_not_a_neighbours_page() -> None:
    with pytest.raises(InvalidInputError, match="at least 3 blocks wide"):
        page_lists(lengths([1, 1], [9, 4]), torch.zeros(2, 2, dtype=torch.int32), 4, cut_surplus=False, window=None)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (20, 1, 6)])
def test_blocks_that_a_window_gave_back_are_not_read(query_lens: tuple[int, ...]) -> None:
    case = Case(**HALF, query_lens=query_lens, seq_lens=(80, 33, 120), sliding_window=20)
    problem = written(case)
    table = problem.common.block_table.clone()
    for row, (new, total) in enumerate(zip(query_lens, case.seq_lens, strict=True)):
        table[row, : max(0, total - new - 19) // 16] = -1
    assert bool((table[2, :2] == -1).all())
    attend(problem, builder_of(problem).build(problem.common.replace(block_table=table)))


def test_nothing_is_read_from_the_device_where_the_host_knows() -> None:
    problem = written(MIXED)
    blind = problem.common.replace(
        query_start_loc=problem.common.query_start_loc.to("meta"), seq_lens=problem.common.seq_lens.to("meta")
    )
    attend(problem, builder_of(problem).build(blind))


def test_unknown_lengths_are_copied_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    flashinfer_pages._say_that_a_build_waits.cache_clear()
    problem = written(MIXED)
    common = problem.common.replace(query_start_loc_cpu=None, seq_lens_cpu=None)
    with caplog.at_level(logging.INFO, logger="pagedattn"):
        for _ in range(2):
            attend(problem, builder_of(problem).build(common))
    assert len([record for record in caplog.records if "FLASHINFER plans with lengths" in record.message]) == 1


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "decodes", "kinds"),
    [
        ((1, 1, 9, 5), (20, 37, 24, 5), 2, ["decode", "prefill"]),
        ((1, 1, 9, 5), (20, 37, 24, 5), 0, ["prefill"]),
        ((1, 0, 1), (20, 30, 24), 3, ["decode", "prefill"]),
        ((0, 1, 1), (5, 30, 24), 3, ["prefill"]),
        ((1, 1, 0, 0), (9, 40, 0, 0), 4, ["decode"]),
        ((1, 1), (0, 9), 2, ["decode"]),
        ((0, 0), (7, 0), 0, []),
        ((), (), 0, []),
    ],
    ids=str,
)
def test_decodes_in_front_and_the_rest(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], decodes: int, kinds: list[str]
) -> None:
    if not query_lens:
        empty = CommonAttentionMetadata.from_lengths([], [], torch.zeros(0, 4, dtype=torch.int32))
        problem = written(MIXED)
        metadata = builder_of(problem).build(empty)
        out = OnCpu.impl(problem.spec).forward(AttentionCall(problem.query[:0], problem.cache), metadata)
        assert out.shape == (0, 4, 64) and metadata.parts(16) == ()
        return
    problem = written(Case(**HALF, query_lens=query_lens, seq_lens=seq_lens, write=False))
    metadata = builder_of(problem).build(problem.common.replace(num_decodes=decodes))
    attend(problem, metadata)
    assert [part.kind for part in metadata.parts(16)] == kinds


def test_one_plan_serves_all_layers_and_a_replaced_one_is_made_again(fake: Any) -> None:
    first, second = written(DECODES), written(DECODES.but(seq_lens=(5, 33, 80)), seed=1)
    builder = builder_of(first)
    one = builder.build(first.common)
    for _ in range(3):
        attend(first, one)
    assert fake.plans == 1
    two = builder.build(second.common)
    attend(second, two)
    assert fake.plans == 2
    attend(first, one)
    attend(second, two)
    attend(second, two)
    assert fake.plans == 4


def test_a_spec_without_a_block_size_follows_the_cache(fake: Any) -> None:
    problem = written(MIXED.but(block_size=8))
    builder = OnCpu.builder(problem.spec.replace(block_size=None), CPU)
    metadata = builder.build(problem.common)
    attend(problem, metadata)
    attend(problem, metadata)
    assert fake.plans == 4  # two wrappers, for blocks of 16 first and then for those of the cache


def test_other_errors_of_the_library_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = written(DECODES)
    text = "Unsupported group_size: 6"

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(RuntimeError, match="Unsupported group_size"):
        builder_of(problem).build(problem.common)
    text = "Buffer overflow when allocating memory for batch_decode_o_indptr with size 9, but only 4 bytes"
    with pytest.raises(CapacityError, match="batch_decode_o_indptr"):
        builder_of(problem).build(problem.common)


def test_lse_is_natural_and_a_row_without_keys_has_none() -> None:
    problem = written(Case(**HALF, query_lens=(1, 2), seq_lens=(1, 1), write=False))
    assert problem.cache is not None
    lse = torch.full(problem.query.shape[:2], torch.nan)
    call = AttentionCall(problem.query, problem.cache, lse=lse)
    out = OnCpu.impl(problem.spec).forward(call, builder_of(problem).build(problem.common))
    key = problem.cache.key[int(problem.common.block_table[0, 0]), 0].repeat_interleave(2, 0).float()
    want = (problem.query[0].float() * key).sum(-1) / math.sqrt(64)
    assert torch.allclose(lse[0], want, atol=1e-3)
    assert bool((lse[1] == -math.inf).all()) and not out[1].any() and bool(lse[2].isfinite().all())
