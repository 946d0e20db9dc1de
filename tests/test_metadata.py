"""CommonAttentionMetadata.from_lengths and plan_step: one description of a step for every backend and layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, StepMetadata, plan_step
from pagedattn.backends.base import AttentionMetadata
from pagedattn.errors import CapacityError, InvalidInputError
from pagedattn.testing.op_oracles import slot_mapping_oracle

TABLE = torch.tensor([[3, 9, -7], [4, 2**31 - 1, 0], [6, 1, 8]], dtype=torch.int32)
QUERY_LENS, SEQ_LENS = [1, 3, 5], [17, 3, 40]


def test_from_lengths_says_everything() -> None:
    common = CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE)
    assert common.query_start_loc.tolist() == [0, 1, 4, 9]
    assert common.seq_lens.tolist() == SEQ_LENS
    assert common.query_start_loc.dtype == common.seq_lens.dtype == common.block_table.dtype == torch.int32
    assert torch.equal(common.block_table, TABLE)
    want = slot_mapping_oracle([TABLE.tolist()], [16], QUERY_LENS, SEQ_LENS, 9)
    assert torch.equal(common.slot_mapping, want[0]) and common.slot_mapping.dtype == torch.int64
    assert common.slot_mapping[:2].tolist() == [9 * 16, 4 * 16]
    assert common.query_start_loc_cpu is not None and common.query_start_loc_cpu.tolist() == [0, 1, 4, 9]
    assert common.seq_lens_cpu is not None and common.seq_lens_cpu.tolist() == SEQ_LENS
    assert (common.num_seqs, common.num_tokens, common.max_query_len, common.max_seq_len) == (3, 9, 5, 40)
    assert (common.num_decodes, common.shared_prefix_len) == (1, 0)


@pytest.mark.parametrize("count", range(9))
def test_lengths_are_as_aligned_as_starts(count: int) -> None:
    """They are sent together; a kernel is compiled anew for tensors that begin at no multiple of 16 bytes."""
    step = CommonAttentionMetadata.from_lengths([1] * count, [2] * count)
    assert (step.seq_lens.data_ptr() - step.query_start_loc.data_ptr()) % 16 == 0
    assert step.seq_lens.tolist() == [2] * count and step.query_start_loc.tolist() == [*range(count + 1)]


def test_the_block_size_is_that_of_the_slots() -> None:
    common = CommonAttentionMetadata.from_lengths([2], [6], TABLE[:1], block_size=4)
    assert common.slot_mapping.tolist() == [9 * 4, 9 * 4 + 1]
    assert common.block_size == common.replace(num_decodes=0).block_size == 4
    assert CommonAttentionMetadata.from_lengths([2], [6]).block_size is None


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, lambda lens: [np.int64(n) for n in lens]])
def test_lengths_of_any_kind_on_the_host(kind: Callable[[list[int]], Any]) -> None:
    common = CommonAttentionMetadata.from_lengths(kind(QUERY_LENS), kind(SEQ_LENS), TABLE)
    assert common.query_start_loc.tolist() == [0, 1, 4, 9]
    bounds = common.num_tokens, common.max_query_len, common.max_seq_len
    assert bounds == (9, 5, 40) and {*map(type, bounds)} == {int}


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "decodes"),
    [
        ([1, 1, 1], [5, 9, 2], 3),
        ([1, 1, 4], [5, 9, 4], 2),
        ([4, 1, 1], [4, 9, 9], 0),
        ([1, 1, 1], [5, 1, 9], 1),
        ([1, 0, 1], [5, 0, 9], 1),
        ([], [], 0),
    ],
)
def test_decodes_are_counted_from_the_front(query_lens: list[int], seq_lens: list[int], decodes: int) -> None:
    assert CommonAttentionMetadata.from_lengths(query_lens, seq_lens).num_decodes == decodes
    assert CommonAttentionMetadata.from_lengths(query_lens, seq_lens, num_decodes=0).num_decodes == 0


def test_without_a_table_nothing_is_written() -> None:
    common = CommonAttentionMetadata.from_lengths([2, 1], [2, 1])
    assert common.slot_mapping.tolist() == [-1, -1, -1]
    assert common.block_table.shape == (2, 0)


def test_no_sequences() -> None:
    common = CommonAttentionMetadata.from_lengths([], [])
    assert common.query_start_loc.tolist() == [0]
    assert (common.num_seqs, common.num_tokens, common.max_query_len, common.max_seq_len) == (0, 0, 0, 0)
    assert common.slot_mapping.numel() == common.seq_lens.numel() == 0


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "table", "match"),
    [
        ([1, 2], [3], None, r"seq_lens must be as many as query_lens \(2\), got 1"),
        ([-1], [3], None, "query_lens and seq_lens must be non-negative"),
        ([1], [-3], None, "query_lens and seq_lens must be non-negative"),
        ([1], [3], TABLE[:1].long(), r"block_table must be int32 \[1, max_blocks\], got torch.int64"),
        ([1], [3], TABLE, r"block_table must be int32 \[1, max_blocks\]"),
        ([1], [3], TABLE[0], r"block_table must be int32 \[1, max_blocks\]"),
        ([1], [49], TABLE[:1], "seq_lens must be at most 3 blocks x 16 tokens, got 49; widen the block table"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(
    query_lens: list[int], seq_lens: list[int], table: torch.Tensor | None, match: str
) -> None:
    with pytest.raises(InvalidInputError, match=match):
        CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table)


def test_it_is_a_value() -> None:
    common = CommonAttentionMetadata.from_lengths([1], [3], TABLE[:1])
    assert common.replace(num_decodes=0).num_decodes == 0 and common.num_decodes == 1
    with pytest.raises(AttributeError):
        common.num_decodes = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("query_lens", "decodes", "got"),
    [
        ([5, 1], 2, "at most 0, .*got 2, where sequence 0 has 5; pass 0"),
        ([1, 3], 2, "at most 1, .*got 2, where sequence 1 has 3; pass 0"),
        ([0, 1], 1, "at most 0, .*got 1, where sequence 0 has 0; pass 0"),
        ([1, 1], 3, r"in 0\.\.2, .*got 3"),
        ([1, 1], -1, r"in 0\.\.2, .*got -1"),
    ],
)
def test_decodes_that_are_none_are_refused(query_lens: list[int], decodes: int, got: str) -> None:
    with pytest.raises(InvalidInputError, match=f"num_decodes must be {got}"):
        CommonAttentionMetadata.from_lengths(query_lens, [5, 9], TABLE[:2], num_decodes=decodes)


def test_padding_decodes_nothing() -> None:
    assert CommonAttentionMetadata.from_lengths([1, 0], [5, 0], TABLE[:2], num_decodes=2).num_decodes == 2


@pytest.mark.parametrize(
    ("lens", "got"),
    [
        ([1.0], r"integers, one per sequence, got \[1.0\]"),
        ([[1]], "integers"),
        (torch.ones(1).to("meta"), "on the host"),
    ],
    ids=["floats", "nested", "device"],
)
def test_lengths_that_are_no_integers_of_the_host_are_refused(lens: Any, got: str) -> None:
    with pytest.raises(InvalidInputError, match=f"query_lens must be {got}"):
        CommonAttentionMetadata.from_lengths(lens, [1], TABLE[:1])


def test_blocks_without_tokens_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="block_size must be at least 1, got 0"):
        CommonAttentionMetadata.from_lengths([1], [1], TABLE[:1], block_size=0)


def layer(window: int | None = None, group: int = 0) -> Attention:
    return Attention(2, 16, sliding_window=window, kv_group=group)


def test_a_step_is_built_once_per_group_and_spec() -> None:
    layers = [layer(), layer(), layer(8), layer(group=1), layer(8)]
    common = CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE)
    other = CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE.flip(0))
    step = plan_step(layers, {0: common, 1: other})
    of = [step.of(one.plan_key) for one in layers]
    assert len(step.by_key) == 3
    assert of[0] is of[1] and of[2] is of[4] and of[0] is not of[2]
    assert of[3].common is other and all(of[i].common is common for i in (0, 1, 2, 4))
    assert step.describe().count("group 0: TORCH") == 2 and step.describe().count("group 1: TORCH") == 1


class MakesKeys:
    """A layer that makes its key each time, so that another's may lie where one was."""

    def __init__(self, like: Attention) -> None:
        self.kv_group, self.builder, self._key = like.kv_group, like.builder, like.plan_key

    @property
    def plan_key(self) -> tuple[Any, ...]:
        return tuple([*self._key])


def test_keys_that_layers_make_each_time_are_compared_by_value() -> None:
    kinds = [layer(), layer(8), layer(9)]
    made: list[Any] = [MakesKeys(kinds[i // 10]) for i in range(30)]
    assert made[0].plan_key is not made[0].plan_key
    step = plan_step(made, CommonAttentionMetadata.from_lengths([1], [3], TABLE[:1]))
    assert list(step.by_key) == [kind.plan_key for kind in kinds]


def test_one_description_is_that_of_group_0() -> None:
    common = CommonAttentionMetadata.from_lengths([1], [3], TABLE[:1])
    assert plan_step([layer()], common).of(layer().plan_key).common is common
    with pytest.raises(InvalidInputError, match=r"common_by_group must be an entry for KV group 1, got \[0\]"):
        plan_step([layer(), layer(group=1)], common)


def test_a_layers_group_stands() -> None:
    """Its plan key was made with it."""
    one = layer(group=1)
    with pytest.raises(AttributeError):
        one.kv_group = 0  # type: ignore[misc]
    assert one.kv_group == one.plan_key[0] == 1


def test_a_layer_that_was_not_planned_is_refused() -> None:
    step = plan_step([layer()], CommonAttentionMetadata.from_lengths([1], [3], TABLE[:1]))
    with pytest.raises(InvalidInputError, match="pass every layer of the model to plan_step"):
        step.of(layer(8).plan_key)


def test_into_rewrites_the_same_buffers() -> None:
    one = layer()
    first = plan_step([one], CommonAttentionMetadata.from_lengths([1, 1], [9, 30], TABLE[:2].clone()))
    built: AttentionMetadata = first.of(one.plan_key)
    pointers = [built.common.seq_lens.data_ptr(), built.common.block_table.data_ptr()]
    again: StepMetadata = plan_step([one], CommonAttentionMetadata.from_lengths([1, 1], [4, 8], TABLE[1:]), first)
    rewritten = again.of(one.plan_key)
    assert rewritten is built
    assert built.common.seq_lens.tolist() == [4, 8] and torch.equal(built.common.block_table, TABLE[1:])
    assert pointers == [built.common.seq_lens.data_ptr(), built.common.block_table.data_ptr()]


def test_into_refuses_a_step_beyond_its_bounds() -> None:
    one = layer()
    first = plan_step([one], CommonAttentionMetadata.from_lengths([1], [9], TABLE[:1].clone()))
    with pytest.raises(CapacityError, match="max_seq_len"):
        plan_step([one], CommonAttentionMetadata.from_lengths([1], [40], TABLE[2:]), first)


def test_into_refuses_blocks_of_another_size() -> None:
    one = layer()
    first = plan_step([one], CommonAttentionMetadata.from_lengths([1], [9], TABLE[:1].clone(), block_size=32))
    with pytest.raises(InvalidInputError, match="block_size must be 32, as of the captured step, got 16"):
        plan_step([one], CommonAttentionMetadata.from_lengths([1], [9], TABLE[:1]), first)


def test_a_captured_step_owns_its_buffers_and_takes_padded_ones() -> None:
    one = Attention(2, 16, backend="TRITON")
    common = CommonAttentionMetadata.from_lengths([1, 1, 1], [9, 30, 7], TABLE)
    first = plan_step([one], common, capture=True)
    built = first.of(one.plan_key).common
    assert built.seq_lens.data_ptr() != common.seq_lens.data_ptr() and built.seq_lens_cpu is None
    plan_step([one], CommonAttentionMetadata.from_lengths([1], [4], TABLE[1:2]), first)
    assert built.seq_lens.tolist() == [4, 0, 0] and built.query_start_loc.tolist() == [0, 1, 1, 1]
    assert built.slot_mapping.tolist() == [int(TABLE[1, 0]) * 16 + 3, -1, -1]
    assert torch.equal(built.block_table[0], TABLE[1]) and not built.block_table[1:].any()
    assert common.seq_lens.tolist() == [9, 30, 7]
