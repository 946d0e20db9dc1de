"""The expanded form's workspace: what is allocated beside the output stays within the bound, in few, large pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pagedattn import CommonAttentionMetadata, MLAAttention, MLASpec, PagedKVCache
from pagedattn.layers.mla_forms import LatentDims
from pagedattn.layers.mla_pieces import ExpandedBytes, plan_chunks, plan_pieces
from pagedattn.layers.mla_step import MLAMetadata

DEEPSEEK = LatentDims(128, 512, 64, 128, 128)
MIB = 1 << 20


class Allocated(TorchDispatchMode):
    """Counts the bytes that are alive at once of what ops return. Nothing large is computed, and its memory not
    touched."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        given = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)}
        self._alive = {at: (ref, size) for at, (ref, size) in self._alive.items() if not ref.expired()}
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
        if writes:
            return given.get("out", args[0] if func._schema.returns else None)
        large = any(isinstance(x, torch.Tensor) and x.numel() > 1 << 16 for x in tree_leaves((args, given)))
        if not large or any(one.alias_info is not None for one in func._schema.returns):
            result = func(*args, **given)
        else:
            args, given = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, given))
            result = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="cpu"), func(*args, **given))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in known:
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def allocated(new: Sequence[int], total: Sequence[int], stored: str = "auto", **options: Any) -> Allocated:
    """What a step of DeepSeek's heads in bfloat16 allocates, its output aside."""
    heads, latent, rope, nope, value = DEEPSEEK
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_dtype": stored}
    layer = MLAAttention(*DEEPSEEK, 0.1, device="cpu", backend="TORCH", **kind, **options)
    spec = MLASpec(head_dim=latent + rope, latent_dim=latent, block_size=64, **kind)
    cache = PagedKVCache.from_specs([spec], 2, device="cpu")
    table = torch.ones(len(new), -(-max(total) // 64), dtype=torch.int32)
    metadata = layer.build(CommonAttentionMetadata.from_lengths(new, total, table, block_size=64))
    rows = sum(new)
    shapes = (rows, heads, nope), (rows, heads, rope), (heads, nope, latent), (heads, value, latent)
    q_nope, q_pe, w_uk, w_uv = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    out = torch.empty(rows, heads, value, dtype=torch.bfloat16)
    with Allocated() as counted:
        layer(q_nope, q_pe, None, None, w_uk, w_uv, cache.layer(0), metadata, out)
    return counted


@pytest.mark.parametrize(
    ("new", "total", "bound", "stored"),
    [
        ([4096], [8192], 512 * MIB, "auto"),
        ([2048], [8192], 64 * MIB, "auto"),
        ([2048], [8192], 64 * MIB, "fp8"),
        ([300, 1700], [300, 8192], 64 * MIB, "fp8_ds_mla"),
        ([3000], [3000], 512 * MIB, "auto"),
        ([1, 700], [500, 2000], 4 * MIB, "auto"),
        ([200], [900], 4 * MIB, "fp8_ds_mla"),  # which is limited by what decodes rows
    ],
    ids=str,
)
def test_all_that_is_allocated_stays_within_the_bound(
    new: list[int], total: list[int], bound: int, stored: str
) -> None:
    counted = allocated(new, total, stored, workspace_bytes=bound)
    assert bound // 3 < counted.peak <= bound


def plan(new: list[int], total: list[int], most: int) -> tuple[list[Any], int]:
    """Pieces, and the dense calls of all their heads."""
    pieces = plan_pieces(new, total, 128, ExpandedBytes.of(DEEPSEEK, torch.bfloat16, None), most)
    return pieces, sum(
        len(calls) * (128 // one.heads)
        for one in pieces
        for _, calls in plan_chunks(one.query_lens, one.seq_lens, one.keys)
    )


@pytest.mark.parametrize(
    ("new", "total", "most", "heads", "calls"),
    [
        ([2048], [2048], 512 * MIB, 128, 1),  # a prompt: its keys by one call
        ([200, 300], [500, 300], 512 * MIB, 128, 2),  # its keys, and those before
        ([172], [131072], 512 * MIB, 128, 1 + 22),
        ([8192], [8192], 512 * MIB, 32, 4),  # fewer heads, whose keys need no merging
        ([4096], [8192], 512 * MIB, 32, 4 * 2),
        ([2048], [131072], 512 * MIB, 64, 2 * (1 + 18)),
    ],
    ids=str,
)
def test_pieces_are_few_and_large(new: list[int], total: list[int], most: int, heads: int, calls: int) -> None:
    pieces, made = plan(new, total, most)
    assert [one.heads for one in pieces] == [heads] and made == calls


def test_rows_are_cut_where_those_of_one_head_take_too_much() -> None:
    pieces, _ = plan([5, 0, 4000, 9], [5, 7, 9000, 9], 4 * MIB)
    assert len(pieces) == 4 and all(one.heads == 1 for one in pieces)
    assert [one.first_seq for one in pieces] == [0, 2, 2, 2]
    rows = [sum(one.query_lens) for one in pieces]
    assert [one.first_row for one in pieces] == [sum(rows[:i]) for i in range(4)] and sum(rows) == 4014
    assert pieces[0].query_lens[:2] == [5, 0] and pieces[-1].seq_lens == [9000, 9]
    assert pieces[1].seq_lens == [9000 - 4000 + pieces[0].query_lens[2] + rows[1]]
    tiny = plan_pieces([3], [4], 1, ExpandedBytes.of(DEEPSEEK, torch.bfloat16, None), 1)
    assert [(one.query_lens, one.seq_lens, one.keys) for one in tiny] == [([1], [2], 1), ([1], [3], 1), ([1], [4], 1)]


def test_a_step_says_how_it_is_cut() -> None:
    layer = MLAAttention(*DEEPSEEK, 0.1, device="cpu", dtype=torch.bfloat16, workspace_bytes=2 * MIB)
    common: Callable[..., Any] = CommonAttentionMetadata.from_lengths
    built = layer.build(common([2000], [2000], torch.ones(1, 32, dtype=torch.int32), block_size=64))
    assert isinstance(built, MLAMetadata) and len(built.pieces) == 4
    assert built.describe().endswith("chunks, 1 heads at once, 4 pieces of rows")
