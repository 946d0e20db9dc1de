"""The benchmark's workloads: what their texts mean, and the problems made of them."""

from __future__ import annotations

import pytest

from pagedattn.bench import problem
from pagedattn.bench.table import case_of
from pagedattn.bench.workload import parse
from pagedattn.errors import InvalidInputError


def test_lengths_of_a_workload() -> None:
    lens = {
        "8q2k": ([2048] * 8, [2048] * 8),
        "3q1s4k": ([1] * 3, [4096] * 3),
        "2q2ks16k": ([2048] * 2, [16384] * 2),
        "q5s7": ([5], [7]),
        "1q1": ([1], [1]),
        "5q1s10..30": ([1] * 5, [10, 15, 20, 25, 30]),
        "1q1s10..30": ([1], [10]),
        "3q2s8..4": ([2] * 3, [8, 6, 4]),
        "4q1s8*1.5": ([1] * 4, [8, 12, 18, 27]),
    }
    for text, expected in lens.items():
        assert parse(text)[1:] == (*expected, 0), text
    assert parse("2q1s9k@8k") == ("2q1s9k@8k", [1, 1], [9216, 9216], 8192) and parse("1q2s9+1q1s8@7").shared == 7
    assert parse("48q1s3000..4927").seq_lens == [3000 + 41 * i for i in range(48)]
    assert parse("64q1s128*1.0906").seq_lens == [int(128 * 1.0906**i) for i in range(64)]
    assert parse("1q1s64k+31q1s512").seq_lens == [65536] + [512] * 31


def test_a_shared_prefix_lies_in_the_same_blocks() -> None:
    paged = problem.make_problem(case_of("3q1s100@70", gpu=False)).paged()
    table, common = paged.common.block_table, paged.common
    assert common.shared_prefix_len == 64 and len(paged.layer(0).key) == 1 + 4 + 3 * 3
    assert bool((table[:, :4] == table[0, :4]).all()) and len(table.unique()) == 4 + 3 * 3
    assert problem.make_problem(case_of("3q1s100", gpu=False)).paged().common.shared_prefix_len == 0


def test_decodes_come_first() -> None:
    mixed = parse("1q2ks4k_2q1s5_1q1_1q3")
    assert mixed == ("1q2ks4k+2q1s5+1q1+1q3", [1, 1, 2048, 1, 3], [5, 5, 4096, 1, 3], 0)
    assert mixed.num_decodes == 2
    assert [case_of(text, gpu=True).suite for text in ("2q1s9", "2q9", "2q9+1q1s4", "2q1s9@8")] == [
        *("decode", "prefill", "mixed", "shared")
    ]
    assert [case_of(text, gpu=True).suite for text in ("2q16s17", "2q17s40", "2q4s16", "2q4s40+1q9", "2q17s80")] == [
        *("speculative", "prefill", "append", "prefill", "append")
    ]
    built = problem.make_problem(case_of("1q20s64+2q1s100", gpu=False)).paged().common
    assert (built.num_decodes, built.num_seqs, built.max_query_len) == (2, 3, 20)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "q",
        "1q4s",
        "1q4x",
        "0q4",
        "1q0",
        "1q4s3",
        "2q1s9..",
        "2q1s9*",
        "1q4++1q4",
        "1q1s9@",
        "1q1s9@x",
        "1q1s9@9",
        "2q1s9@4@4",
        "1q1s9+1q5@4",
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="workload must be"):
        parse(text)


def test_bytes_and_operations() -> None:
    work = parse("2q1s100+1q3")
    assert work.keys_read() == 203
    assert parse("2q1s100+1q3s90@64").keys_read() == 64 + 36 + 36 + 26
    assert work.flops(heads=32, dim=128) == 4 * 32 * 128 * (100 + 100 + 1 + 2 + 3)
