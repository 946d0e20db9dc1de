"""Attention, the layer: it computes the oracle's answer, whoever serves it and however it is handed its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pagedattn import Attention, AttentionType, CommonAttentionMetadata, LayerCache, Mask, PagedKVCache, plan_step
from pagedattn.backends.op_backend import OpMetadataBuilder
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.testing import Case, Problem, assert_close, attention_oracle, interpreted, make_problem

MIXED: dict[str, Any] = {"query_lens": (1, 1, 9, 5), "seq_lens": (20, 37, 24, 5), "heads": (4, 2), "head_dim": 32}
BACKENDS = [
    "TORCH",
    pytest.param(
        "TRITON", marks=pytest.mark.skipif(not interpreted(), reason="TRITON serves the CPU only when interpreted")
    ),
]


def layer_of(problem: Problem, backend: str = "TORCH", **changes: Any) -> Attention:
    case = problem.case
    arguments: dict[str, Any] = {
        "num_heads": case.heads[0],
        "num_kv_heads": case.heads[1],
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "scale": case.scale,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "alibi_slopes": problem.alibi_slopes,
        "sinks": problem.sinks,
        "attn_type": case.attn_type,
        "causal": case.causal,
        "dtype": case.dtype,
        "backend": backend,
    }
    return Attention(**{**arguments, **changes})


def run(problem: Problem, layer: Attention, query: torch.Tensor | None = None) -> torch.Tensor:
    rows = problem.query if query is None else query
    return layer(rows, problem.key, problem.value, problem.cache, problem.common)


def check(problem: Problem, out: torch.Tensor) -> None:
    case = problem.case
    assert_close(
        case.id, out[: sum(case.query_lens)], problem.expected, problem.naive, softcap=case.softcap is not None
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(**MIXED),
        Case(**MIXED, sliding_window=7, softcap=5.0, sinks=0.5),
        Case(**MIXED, alibi=True, head_dim_v=16, scale=0.3),
        Case(**MIXED, layout="HND", fused_qkv=True, padding_rows=3),
        Case(paged=False, attn_type=AttentionType.ENCODER_ONLY, seq_lens=(5, 1, 17), sliding_window=4),
        Case(paged=False, seq_lens=(5, 1, 17), note="dense decoder"),
        Case(query_lens=(0, 0), seq_lens=(0, 0), note="nothing"),
    ],
    ids=lambda case: case.id,
)
def test_it_is_the_oracle(case: Case, backend: str) -> None:
    problem = make_problem(case)
    check(problem, run(problem, layer_of(problem, backend)))
    if problem.cache is not None and problem.cache_after is not None:
        assert torch.equal(problem.cache.key.nan_to_num(7.0), problem.cache_after.key.nan_to_num(7.0))
        assert torch.equal(problem.cache.value.nan_to_num(7.0), problem.cache_after.value.nan_to_num(7.0))


def test_flat_rows_give_flat_rows() -> None:
    problem = make_problem(Case(**MIXED, head_dim_v=16, sinks=0.0))
    layer = layer_of(problem)
    out = run(problem, layer)
    assert problem.key is not None and problem.value is not None
    flat = layer(
        problem.query.flatten(1), problem.key.flatten(1), problem.value.flatten(1), problem.cache, problem.common
    )
    assert (out.shape, flat.shape) == ((16, 4, 16), (16, 64))
    assert torch.equal(flat, out.flatten(1))
    for target in (torch.empty(16, 4, 16), torch.empty(16, 64)):
        got = layer(problem.query, None, None, problem.cache, problem.common, out=target)
        assert got.data_ptr() == target.data_ptr() and torch.equal(target.view(16, 4, 16), out)


def test_a_step_may_come_in_three_forms() -> None:
    problem = make_problem(Case(**MIXED))
    layer = layer_of(problem)
    forms = (problem.common, layer.build(problem.common), plan_step([layer], problem.common))
    outs = [layer(problem.query, problem.key, problem.value, problem.cache, form) for form in forms]
    check(problem, outs[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_the_backend_is_chosen_again_where_the_layer_moves() -> None:
    model = nn.Sequential(Attention(2, 16, alibi_slopes=[0.5, 0.25]))
    layer = model[0]
    assert isinstance(layer, Attention)
    first, builder = layer.selection, layer.builder
    model.to(torch.float64)
    assert layer.spec.dtype == torch.float64 and layer.selection is not first and layer.builder is not builder
    assert layer.spec.replace(dtype=torch.float32) == first.spec
    model.to("meta").half()
    assert (layer.spec.dtype, layer.selection.name) == (torch.float16, "TORCH")
    assert not list(model.parameters()) and not model.state_dict()
    with pytest.raises(UnsupportedError, match=r"TORCH.*dtype=float8_e5m2"):
        model.to(torch.float8_e5m2)


def test_a_moved_layer_computes_in_its_new_dtype() -> None:
    problem = make_problem(Case(**MIXED, dtype=torch.float64))
    layer = layer_of(problem, dtype=torch.float32).to(torch.float64)
    check(problem, run(problem, layer))


@pytest.mark.skipif(not interpreted(), reason="a GPU's TRITON serves bfloat16")
def test_moving_to_what_the_backend_asked_for_cannot_serve_raises() -> None:
    layer = Attention(2, 16, backend="TRITON")
    with pytest.raises(UnsupportedError, match=r"TRITON, asked for by argument, cannot serve this:\n.*bfloat16"):
        layer.to(torch.bfloat16)


def test_it_prints_its_heads_and_who_serves_it() -> None:
    assert repr(Attention(6, 24, 2, backend="TORCH")) == "Attention(6/2 heads of 24, backend=TORCH)"
    assert repr(Attention(6, 24, backend="TORCH")) == "Attention(6/6 heads of 24, backend=TORCH)"


def test_a_dtype_by_name_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"dtype must be a torch\.dtype, got 'bfloat16'"):
        Attention(2, 16, dtype="bfloat16")  # type: ignore[arg-type]


def test_whole_numbers_are_sinks_too() -> None:
    assert Attention(2, 16, sinks=[0, 1]).to(torch.bfloat16).sinks.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_sinks_and_slopes_move_with_the_layer() -> None:
    layer = Attention(2, 16, sinks=[0.0, 0.0], alibi_slopes=[0.5, 0.25]).to("meta")
    assert layer.sinks is not None and layer._slopes is not None
    assert layer.sinks.device.type == layer._slopes.device.type == "meta"


def test_a_layer_without_keys_reads_another_layers_cache() -> None:
    problem = make_problem(Case(**MIXED))
    owner, reader = layer_of(problem), layer_of(problem, sliding_window=6)
    run(problem, owner)
    assert problem.cache is not None
    before = problem.cache.key.clone()
    shared = reader(problem.query, None, None, problem.cache, problem.common)
    assert torch.equal(problem.cache.key.nan_to_num(7.0), before.nan_to_num(7.0))
    windowed = make_problem(Case(**MIXED, sliding_window=6))
    check(windowed, shared)


def test_cross_attention_writes_once_and_reads_ever_after() -> None:
    encoder_lens, table = [30, 17], torch.tensor([[4, 1], [2, 3]], dtype=torch.int32)
    keys, values = torch.randn(47, 2, 16), torch.randn(47, 2, 16)
    slots = CommonAttentionMetadata.from_lengths(encoder_lens, encoder_lens, table).slot_mapping
    cache = PagedKVCache(num_layers=1, num_blocks=5, num_kv_heads=2, head_dim=16).layer(0)
    layer = Attention(4, 16, 2, attn_type=AttentionType.CROSS)
    for step, query_lens in enumerate(([6, 2], [1, 1], [1, 1])):
        query = torch.randn(sum(query_lens), 4, 16)
        common = CommonAttentionMetadata.from_lengths(query_lens, encoder_lens, table)
        if step == 0:
            out = layer(query, keys, values, cache, common.replace(slot_mapping=slots))
        else:
            out = layer(query, None, None, cache, common)
        parts = zip(query.split(query_lens), keys.split(encoder_lens), values.split(encoder_lens), strict=True)
        want = torch.cat([attention_oracle(q, k, v, scale=0.25, mask=Mask(causal=False))[0] for q, k, v in parts])
        assert torch.allclose(out.double(), want, atol=1e-5)


def test_an_encoder_attends_both_ways_and_needs_no_cache() -> None:
    rows = torch.randn(9, 2, 16)
    layer = Attention(2, 16, attn_type=AttentionType.ENCODER_ONLY)
    common = CommonAttentionMetadata.from_lengths([4, 5], [4, 5])
    out = layer(rows, rows, rows, None, common)
    want = torch.cat([attention_oracle(x, x, x, scale=0.25, mask=Mask(causal=False))[0] for x in rows.split([4, 5])])
    assert torch.allclose(out.double(), want, atol=1e-5)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CommonAttentionMetadata]]:
    seen: list[CommonAttentionMetadata] = []
    original = OpMetadataBuilder.build

    def build(self, common, into=None, capture=False):  # type: ignore[no-untyped-def]
        seen.append(common)
        return original(self, common, into, capture)

    monkeypatch.setattr(OpMetadataBuilder, "build", build)
    yield seen


def test_a_model_builds_its_step_once_per_kind_of_layer(builds: list[CommonAttentionMetadata]) -> None:
    windows = [None, 6, None, 6, 3]
    problems = {window: make_problem(Case(**MIXED, sliding_window=window)) for window in windows}
    layers = [layer_of(problems[window]) for window in windows]
    step = plan_step(layers, problems[None].common)
    assert len(builds) == len(set(windows)) == 3
    for layer, window in zip(layers, windows, strict=True):
        problem = problems[window]
        check(problem, layer(problem.query, problem.key, problem.value, problem.cache, step))
    assert len(builds) == 3
    with pytest.raises(InvalidInputError, match="this layer's spec"):
        run_with = layer_of(problems[6], softcap=3.0)
        run_with(problems[6].query, None, None, problems[6].cache, step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sequence_of_nan_stays_alone(backend: str) -> None:
    case = Case(**MIXED)
    clean, dirty = make_problem(case), make_problem(case)
    assert dirty.key is not None and dirty.value is not None and dirty.cache is not None
    dirty.query[2:11] = dirty.key[2:11] = dirty.value[2:11] = torch.nan
    dirty.cache.key[dirty.common.block_table[2, :2].long()] = torch.nan
    dirty.cache.value[dirty.common.block_table[2, :2].long()] = torch.nan
    good, bad = (run(problem, layer_of(problem, backend)) for problem in (clean, dirty))
    assert bad[2:11].isnan().all()
    others = [*range(2), *range(11, 16)]
    assert torch.equal(bad[others], good[others]) and good.isfinite().all()


@pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
@pytest.mark.parametrize("text", ["prefill=TORCH,decode=TRITON", "prefill=TRITON,decode=TORCH"])
@pytest.mark.parametrize("lens", [((1, 1, 9, 5), (20, 37, 24, 5)), ((1, 1), (20, 37)), ((9, 1), (24, 20))])
def test_two_backends_give_what_one_gives(text: str, lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    problem = make_problem(Case(query_lens=lens[0], seq_lens=lens[1], sinks=0.5, sliding_window=30))
    layer = layer_of(problem, text)
    check(problem, run(problem, layer))
    paths = layer.build(problem.common).describe()
    decodes = problem.common.num_decodes
    assert ("decode: " in paths, "prefill: " in paths) == (decodes > 0, decodes < len(lens[0]))


@pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
def test_two_backends_without_a_cache() -> None:
    problem = make_problem(Case(paged=False, query_lens=(1, 5), seq_lens=(4, 5)))
    assert problem.common.num_decodes == 1
    check(problem, run(problem, layer_of(problem, "prefill=TORCH,decode=TRITON")))


class Block(nn.Module):
    """Attention between two projections, as a model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.attn = Attention(2, 16, sliding_window=9)

    def forward(self, x: torch.Tensor, cache: LayerCache, step: Any) -> torch.Tensor:
        return self.attn(*self.qkv(x).split(32, 1), cache, step)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_without_a_graph_break(backend: str) -> None:
    torch._dynamo.reset()
    model, x = Block(), torch.randn(5, 32)
    common = CommonAttentionMetadata.from_lengths([5], [20], torch.tensor([[1, 2]], dtype=torch.int32))
    caches = [PagedKVCache(num_layers=1, num_blocks=3, num_kv_heads=2, head_dim=16) for _ in range(2)]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for step in (common, model.attn.build(common), plan_step([model.attn], common)):
        with torch.no_grad():
            got, want = compiled(x, caches[0].layer(0), step), model(x, caches[1].layer(0), step)
        assert torch.allclose(got, want, atol=1e-6) and bool(want.any())
        assert torch.equal(caches[0].slabs, caches[1].slabs) and bool(caches[0].slabs.any())


def test_a_cache_never_becomes_part_of_a_graph() -> None:
    model, cache = Block(), PagedKVCache(num_layers=1, num_blocks=3, num_kv_heads=2, head_dim=16).layer(0)
    common = CommonAttentionMetadata.from_lengths([5], [20], torch.tensor([[1, 2]], dtype=torch.int32))
    model(torch.randn(5, 32), cache, common)
    assert bool(cache.key.any()) and not cache.key.requires_grad and not cache.value.requires_grad
