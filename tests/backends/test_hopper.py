"""TRITON's prefill kernel for Hopper against the oracle, on one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends.triton_kinds import KINDS, PACKED, case_of_kind

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, plan_step
from pagedattn.backends.registry import get_backend
from pagedattn.backends.triton.metadata import shape_of_spec
from pagedattn.kernels import hopper
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.ops import attention_plan
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

HERE = torch.cuda.is_available() and not hopper.why_not_here(torch.device("cuda", 0))
attention_op = import_module("pagedattn.ops.paged_attention")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)
LENS = [
    ((40,), (40,)),
    ((128,), (200,)),
    ((5, 0, 130, 1, 64), (700, 3, 130, 1, 64)),
    ((40, 3), (10, 0)),
    ((300,), (4000,)),
]


@pytest.mark.parametrize("kind", [*KINDS, *PACKED])
def test_against_the_oracle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, launch = [], attention_op._launch_sm90
    monkeypatch.setattr(attention_op, "_launch_sm90", lambda *given: launches.append(given) or launch(*given))
    for queries, keys in LENS:
        case = case_of_kind(kind).but(query_lens=queries, seq_lens=keys)
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")
    case = case_of_kind(kind).but(query_lens=LENS[2][0], seq_lens=LENS[2][1], fused_qkv=True, padding_rows=5)
    case = case.but(share_blocks=case.paged and not case.poison_behind)
    check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, fused and padded")
    assert launches, "by another kernel"


FEW_BLOCKS = [((40,), (9000,)), ((16, 5, 1), (4000, 700, 2100)), ((100, 0, 30), (3000, 50, 6000)), ((600,), (5000,))]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_few_query_blocks(kind: str) -> None:
    for queries, keys in FEW_BLOCKS:
        case = case_of_kind(kind).but(query_lens=queries, seq_lens=keys)
        if case.sliding_window:  # of so many keys that parts pay
            case = case.but(sliding_window=2030 + case.sliding_window)
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{kind}, {case.id}")


BY_EIGHTS: dict[str, dict[str, Any]] = {
    "groups of 5": {"heads": (10, 2)},
    "groups of 3, fp16, sinks, HND": {"heads": (6, 2), "dtype": torch.float16, "sinks": 0.5, "layout": "HND"},
    "groups of 5, D256, one KV head": {"heads": (5, 1), "head_dim": 256},
    "groups of 3, D80": {"heads": (6, 2), "head_dim": 80},
    "groups of 5, window of 300, released": {"heads": (10, 2), "sliding_window": 300, "poison_behind": True},
    "groups of 3, packed": {"heads": (6, 2), "paged": False},
    "groups of 5, int8": {"heads": (10, 2), "kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("kind", BY_EIGHTS)
def test_tiles_of_eight_tokens_of_a_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several sequences: last tiles of one half and of two, decodes, and over a copy of int8 of 200 tokens."""
    packs, launch = [], attention_op._launch_sm90
    monkeypatch.setattr(attention_op, "_launch_sm90", lambda *given: packs.append(given[1]) or launch(*given))
    case = case_of_kind("plain").but(**BY_EIGHTS[kind])
    group = case.heads[0] // case.heads[1]
    for queries, keys in (
        ((150, 1, 5, 33), (4000, 2500, 1100, 1200)),
        ((65, 20), (1500, 90)),
        ((70, 0, 48, 41), (3000, 7, 48, 2000)),
        ((200, 1), (4000, 600)),
        ((1, 1, 150), (2500, 600, 4000)),
    ):
        packs.clear()
        one = case.but(query_lens=queries, seq_lens=keys, padding_rows=5, fused_qkv=case.paged)
        check(get_backend("TRITON"), make_problem(one, DEVICE), f"{kind}, {one.id}")
        assert group in packs, f"{kind}, {queries}: tiles of {packs} heads"


@pytest.mark.parametrize("heads", [(24, 24), (192, 32), (17, 17), (48, 48)])
def test_more_heads_than_go_over_a_list_together(heads: tuple[int, int]) -> None:
    for queries, keys in (((2000, 1500, 5), (2100, 1500, 900)), ((300,), (300,))):
        case = case_of_kind("plain").but(heads=heads, query_lens=queries, seq_lens=keys)
        check(get_backend("TRITON"), make_problem(case, DEVICE), f"{heads}, {case.id}")


def test_all_lengths_of_parts() -> None:
    """States of two parts up to more than one consumer adds up, each counter and list left as it was found."""
    for queries, keys in (([20], 2100), ([20], 20000), ([33], 120000), ([16] * 3, 9000), ([500], 9000)):
        layer, cache, query, common = layer_and_step(queries, [keys] * len(queries))
        built = layer.build(common)
        assert built.describe().endswith("(for Hopper, split-KV)")
        entries = built.plan.tile_schedule[2 : 2 + int(built.plan.tile_schedule[1, 0])]
        assert int(entries[:, 8].max()) > 1, "no block was cut"
        got, want = (layer(query, None, None, cache, layer.build(common)) for _ in range(2))
        assert torch.equal(got, want) and torch.equal(layer(query, None, None, cache, built), got)
        assert not built.plan.tile_schedule[0, :2].any() and not built.plan.workspace[: 3 * COUNTERS].any()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sm90, "splits_kv", lambda *bounds: False)
            patch.setattr(attention_plan, "handles_short_queries", lambda *bounds: True)
            whole = layer(query, None, None, cache, layer.build(common))
        torch.testing.assert_close(got.float(), whole.float(), atol=2e-3, rtol=2e-2)


def layer_and_step(query_lens: list[int], seq_lens: list[int]) -> tuple[Any, ...]:
    """A layer, its cache of random data, queries, and a step."""
    kind = {"dtype": torch.bfloat16, "device": DEVICE}
    layer = Attention(8, 128, 2, block_size=16, backend="TRITON", **kind)
    blocks = [-(-n // 16) for n in seq_lens]
    cache = PagedKVCache(1, sum(blocks) + 1, 16, 2, 128, **kind)
    cache.slabs.view(torch.bfloat16).normal_()
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    ids = (torch.randperm(sum(blocks)) + 1).int().split(blocks)
    for row, some in zip(table, ids, strict=True):
        row[: len(some)] = some
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table.to(DEVICE))
    query = torch.randn(sum(query_lens), 8, 128, **kind)
    return layer, cache.layer(0), query, common


def test_the_metadata_say_so_and_make_the_list_once() -> None:
    layer, cache, query, common = layer_and_step([1, 1, 300], [5000, 20, 900])
    built = layer.build(common)
    assert built.describe() == "prefill kernel: 3 sequences (for Hopper, split-KV)"
    first = layer(query, None, None, cache, built)
    assert torch.equal(layer(query, None, None, cache, built), first)
    assert not built.plan.tile_schedule[0, :2].any(), "counters that hand out items were not left zero"


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_of_many_sequences(kind: str) -> None:
    """As in speculative decoding: its items, of which half are rows of nobody."""
    queries, keys = [*range(1, 17)] * 5, [16 + 37 * index % 400 for index in range(80)]
    case = case_of_kind(kind).but(query_lens=tuple(queries), seq_lens=tuple(keys))
    problem = make_problem(case, DEVICE)
    check(get_backend("TRITON"), problem, kind)
    if sm90.why_not(shape_of_spec(case.spec(torch.device("cpu"))), ""):
        return
    layer, cache, query, common = layer_and_step(queries, keys)
    built = layer.build(common)
    assert built.describe() == "prefill kernel: 80 sequences (for Hopper)"
    assert torch.equal(layer(query, None, None, cache, built), layer(query, None, None, cache, built))


@pytest.mark.parametrize(("queries", "keys"), [((300, 700, 33, 1), (900, 700, 5000, 40)), ((33, 16), (30000, 3000))])
def test_the_same_bits_a_thousand_times_under_load(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    layer, cache, query, common = layer_and_step([*queries], [*keys])
    plan = plan_step([layer], common)
    want = layer(query, None, None, cache, plan)
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(1000):
        if turn % 10 == 0:
            with torch.cuda.stream(side):
                torch.mm(noise, noise)
        differing += (layer(query, None, None, cache, plan) != want).sum()
    assert int(differing) == 0


WHOLE = [([230, 40, 30], [900, 400, 600]), ([20, 200, 17], [300, 380, 590]), ([300, 0, 0], [900, 0, 0])]
IN_PARTS = [([40, 16, 60], [9000, 4000, 6000]), ([1, 100, 15], [30, 3800, 15]), ([2, 0, 0], [9000, 0, 0])]


@pytest.mark.parametrize(
    ("steps", "longest", "text", "off"),
    [(WHOLE, 300, "(for Hopper)", 0.0), (IN_PARTS, 100, "split-KV)", 2e-3)],
    ids=["whole", "in parts"],
)
def test_replays_with_other_lengths(steps: list[Any], longest: int, text: str, off: float) -> None:
    """off: where keys are cut depends on more than lengths, so that sums may differ from those of a step of its own."""
    layer, cache, query, common = layer_and_step(*steps[0])
    captured = plan_step([layer], common.replace(max_query_len=longest), capture=True)
    assert captured.of(layer.plan_key).describe().endswith(text)
    layer(query, None, None, cache, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(query, None, None, cache, captured)
    for queries, keys in steps:
        step = CommonAttentionMetadata.from_lengths(queries, keys, common.block_table)
        plan_step([layer], step, into=captured)
        graph.replay()
        want = layer(query[: sum(queries)], None, None, cache, plan_step([layer], step))
        torch.testing.assert_close(out[: sum(queries)], want, atol=off, rtol=10 * off)


def test_other_layers_repeat_the_launches() -> None:
    lens = [1, 200, 40], [20, 900, 400]
    layer, cache, query, common = layer_and_step(*lens)
    _, other_cache, other_query, _ = layer_and_step(*lens)
    plan = plan_step([layer], common)
    first = layer(query, None, None, cache, plan)
    second = layer(other_query, None, None, other_cache, plan)
    assert [len(one.plan.calls) for one in plan.by_key.values() if one.plan is not None] == [1]
    assert torch.equal(second, layer(other_query, None, None, other_cache, plan_step([layer], common)))
    assert torch.equal(layer(query, None, None, cache, plan), first) and not torch.equal(first, second)
