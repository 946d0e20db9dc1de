"""Two backends for one layer: what they want of its cache, what of a step's calls is made again, what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from pagedattn import (
    Attention,
    CommonAttentionMetadata,
    LayerCache,
    PagedKVCache,
    paged_attention,
    plan_step,
    register_backend,
)
from pagedattn.backends import registry
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.hybrid import CompositeMetadata, Part, slice_sequences
from pagedattn.backends.op_backend import OpMetadataBuilder
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.errors import InvalidInputError
from pagedattn.spec import Capabilities, GraphLevel
from pagedattn.testing import interpreted

TOGETHER = "prefill=TORCH,decode=AGAIN"
BUILT: list[CommonAttentionMetadata] = []


class AgainBuilder(TorchBackend.builder):
    def build(self, common: CommonAttentionMetadata, into: Any = None, capture: bool = False) -> AttentionMetadata:
        BUILT.append(common)
        return super().build(common, into, capture)


class Again(TorchBackend):
    """Wants blocks of 32."""

    name = "AGAIN"
    builder = AgainBuilder

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), default_block_size=32)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register_backend("AGAIN", f"{__name__}:Again")
    BUILT.clear()


def problem(layer: Attention, query_lens: list[int]) -> tuple[torch.Tensor, LayerCache, CommonAttentionMetadata]:
    size, count = layer.selection.block_size, len(query_lens)
    cache = PagedKVCache(1, 2 * count, size, num_kv_heads=2, head_dim=8)
    cache.slabs.view(torch.float32).normal_()
    table = torch.arange(2 * count, dtype=torch.int32).view(count, 2)
    lens = [size + 3 + i for i in range(count)]
    common = CommonAttentionMetadata.from_lengths(query_lens, lens, table, block_size=size)
    return torch.randn(sum(query_lens), 4, 8), cache.layer(0), common


@pytest.mark.parametrize("text", [TOGETHER, "prefill=AGAIN,decode=TORCH"])
def test_the_larger_of_two_block_sizes_serves_both(text: str) -> None:
    layer = Attention(4, 8, 2, backend=text)
    assert layer.selection.block_size == 32
    query, cache, common = problem(layer, [1, 1, 5])
    assert cache.block_size == 32
    wanted = Attention(4, 8, 2, backend="TORCH")(query, None, None, cache, common)
    assert torch.equal(layer(query, None, None, cache, common), wanted)


@pytest.mark.parametrize("planned", ["prefill", "decode"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 5], [1, 1, 5]], ids=str)
def test_a_step_of_one_backend_alone_has_its_plan(query_lens: list[int], planned: str) -> None:
    """By which other layers make its launches again; a step of both is more than one plan."""
    if not interpreted():
        pytest.skip("needs TRITON on the CPU")
    other = {"prefill": "decode", "decode": "prefill"}[planned]
    layer = Attention(4, 8, 2, backend=f"{planned}=TRITON,{other}=TORCH")
    *_, common = problem(layer, query_lens)
    metadata = layer.build(common)
    assert isinstance(metadata, CompositeMetadata)
    plans = [part.metadata.plan for part in metadata.parts]
    assert metadata.plan is (plans[0] if len(plans) == 1 else None)
    assert [plan is not None for plan in plans] == [part.phase == planned for part in metadata.parts]
    assert len(plans) == (2 if 1 in query_lens and 5 in query_lens else 1)


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 4)], ids=["decodes", "the rest"])
def test_a_part_is_the_step_of_its_sequences(first: int, last: int) -> None:
    queries, lens, table = [1, 1, 5, 3], [20, 9, 30, 3], torch.arange(8, dtype=torch.int32).view(4, 2)
    part = slice_sequences(CommonAttentionMetadata.from_lengths(queries, lens, table), first, last)
    rows, decodes = slice(first, last), 2 if first == 0 else 0
    alone = CommonAttentionMetadata.from_lengths(queries[rows], lens[rows], table[rows], num_decodes=decodes)
    for name in {field.name for field in fields(alone)} - {"max_seq_len"}:
        got, want = getattr(part, name), getattr(alone, name)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, name
    assert part.max_seq_len >= alone.max_seq_len


def test_a_captured_step_of_both_writes_where_the_next_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpMetadataBuilder, "graph_level", GraphLevel.ALWAYS)
    layer = Attention(4, 8, 2, backend=TOGETHER)
    query, cache, common = problem(layer, [1, 1, 5])
    static = plan_step([layer], common, capture=True)
    lens, table = [9, 37, 21], common.block_table.flip(0)
    step = CommonAttentionMetadata.from_lengths([1, 1, 5], lens, table, block_size=32)
    plan_step([layer], step, into=static)
    other = LayerCache(cache.key.clone(), cache.value.clone())
    rows = query[:, :2], query[:, 2:]
    wanted = Attention(4, 8, 2, backend="TORCH")(query, *rows, other, step)
    assert torch.equal(layer(query, *rows, cache, static), wanted)
    assert torch.equal(cache.key, other.key) and torch.equal(cache.value, other.value)


def test_padding_of_captured_decodes_counts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a backend that has no lengths on the host would take it for something else."""
    monkeypatch.setattr(OpMetadataBuilder, "graph_level", GraphLevel.ALWAYS)
    layer, table = Attention(4, 8, 2, backend=TOGETHER), torch.zeros(3, 2, dtype=torch.int32)
    static = plan_step([layer], CommonAttentionMetadata.from_lengths([1, 1, 1], [9, 9, 9], table), capture=True)
    padded = CommonAttentionMetadata.from_lengths([1, 1, 0], [9, 8, 0], table)
    assert padded.num_decodes == 2
    plan_step([layer], padded, into=static)
    assert [(one.num_decodes, one.num_seqs) for one in BUILT] == [(3, 3), (3, 3)]


def test_the_lse_of_both_is_that_of_one() -> None:
    query, cache, common = problem(Attention(4, 8, 2, backend=TOGETHER), [1, 1, 5])
    call = (query, None, None, cache, common)
    got, lse = paged_attention(*call, backend=TOGETHER, return_lse=True)
    wanted, wanted_lse = paged_attention(*call, backend="TORCH", return_lse=True)
    assert torch.equal(got, wanted) and lse is not None and wanted_lse is not None and torch.equal(lse, wanted_lse)


def test_a_step_of_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpMetadataBuilder, "graph_level", GraphLevel.ALWAYS)
    layer = Attention(4, 8, 2, backend=TOGETHER)
    _, cache, _ = problem(layer, [1])
    nobody = CommonAttentionMetadata.from_lengths([], [], torch.zeros(0, 2, dtype=torch.int32), block_size=32)
    static = plan_step([layer], nobody, capture=True)
    for step in (nobody, plan_step([layer], nobody, into=static)):
        assert layer(torch.zeros(0, 4, 8), None, None, cache, step).shape == (0, 4, 8)


class Sharing(AttentionMetadata):
    @property
    def shares_prefix(self) -> bool:
        return True


@pytest.mark.parametrize("at", [None, 0, 1], ids=str)
def test_a_prefix_is_shared_where_either_part_shares_it(at: int | None) -> None:
    common = CommonAttentionMetadata.from_lengths([1, 5], [4, 5])
    kinds = [Sharing if one == at else AttentionMetadata for one in range(2)]
    parts = tuple(Part(name, slice(0), kind(common)) for name, kind in zip(("decode", "prefill"), kinds, strict=True))
    metadata = CompositeMetadata(common, parts, lambda: AttentionMetadata(common))
    assert metadata.shares_prefix == (at is not None)
    assert metadata.describe() == f"decode: {kinds[0].__name__}, prefill: {kinds[1].__name__}"


def test_metadata_of_one_backend_are_refused() -> None:
    layer = Attention(4, 8, 2, backend=TOGETHER)
    query, cache, common = problem(layer, [1, 3])
    with pytest.raises(InvalidInputError, match=r"^metadata must be of two backends, got AttentionMetadata; build it"):
        layer(query, None, None, cache, AttentionMetadata(common))
