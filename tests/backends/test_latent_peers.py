"""FLASH_MLA, FLASH_ATTN and FLASHINFER over latent rows, against the oracle; on a CPU stand-ins of these libraries."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backends import fake_flash_mla
from backends.latent_peers import BACKENDS, DEVICE, DTYPES, GPU, ROW, cases, forget, install

from pagedattn import (
    AttentionCall,
    AttentionSpec,
    CommonAttentionMetadata,
    LayerCache,
    MLAAttention,
    MLASpec,
    PagedKVCache,
    select_backend,
)
from pagedattn.backends import selector
from pagedattn.backends.flash_mla import FlashMLABackend, metadata
from pagedattn.backends.flash_mla.metadata import FlashMLAMetadata, sequences_of_tokens
from pagedattn.backends.flashinfer.metadata import FlashInferMetadata
from pagedattn.backends.registry import get_backend
from pagedattn.bench import flash_mla_library
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.kernels import hopper
from pagedattn.spec import GraphLevel
from pagedattn.testing.case import Case
from pagedattn.testing.compare import assert_close
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import Problem, make_problem

# Of each dtype: all but two windows and a soft cap. FLASH_MLA has fewer, as it has one size of blocks.
MUST_SERVE = {"FLASH_MLA": 25, "FLASH_ATTN": 27, "FLASHINFER": 27}
ALL = [(name, case) for name in BACKENDS for dtype in DTYPES for case in cases(name, dtype)]
ON_CPU = pytest.mark.skipif(GPU, reason="the stand-ins compute on a CPU")
HOPPER = AttentionSpec(
    num_heads=16,
    head_dim=576,
    latent_dim=512,
    scale=192**-0.5,
    dtype=torch.bfloat16,
    device_type="cuda",
    capability=(9, 0),
)


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if GPU:
        flash_mla_library.provide()
        monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", "3")
    else:
        install(monkeypatch)
    yield
    forget()


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name}-{case.id}-{case.dtype}" for name, case in ALL])
def test_conforms(name: str, case: Case) -> None:
    backend = get_backend(name)
    reasons = backend.rejections(case.spec(DEVICE))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    check(backend, make_problem(case, DEVICE), case.id)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_before_the_first_key_see_none(name: str) -> None:
    if not get_backend(name).availability().ok:
        pytest.skip(f"{name} is not installed")
    size: dict[str, Any] = {"block_size": 64} if name == "FLASH_MLA" else {}
    case = Case(**ROW, **size, heads=(4, 1), query_lens=(3, 3), seq_lens=(2, 9), write=False, clean_cache=True)
    check(get_backend(name), make_problem(case, DEVICE), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_serves_all_it_must(name: str) -> None:
    if not get_backend(name).availability().ok:
        pytest.skip(f"{name} is not installed")
    for dtype in DTYPES:
        served = [case for case in cases(name, dtype) if not get_backend(name).rejections(case.spec(DEVICE))]
        assert len(served) == MUST_SERVE[name]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_served_is_refused_with_a_remedy(name: str) -> None:
    backend = get_backend(name)
    base = HOPPER.replace(clean_cache=True)
    base = base.replace(block_size=64) if name == "FLASH_MLA" else base
    if not backend.availability().ok:
        pytest.skip(f"{name} is not installed")
    assert not backend.rejections(base) and not backend.rejections(base.replace(num_heads=128))
    refused: dict[str, dict[str, Any]] = {
        "latent_dim": {"latent_dim": 448, "head_dim_v": None},
        "rope_dim": {"head_dim": 544},
        "dtype": {"dtype": torch.float32},
        "sliding_window": {"sliding_window": 100},
        "softcap": {"softcap": 30.0},
        "kv_cache_dtype": {"kv_cache_dtype": "fp8_e4m3"},
        "deterministic": {"deterministic": True},
    }
    for feature, changes in refused.items():
        assert feature in [reason.feature for reason in backend.rejections(base.replace(**changes))], feature
    for level in (GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE, GraphLevel.ALWAYS):
        captured = {reason.feature for reason in backend.rejections(base.replace(graph_level=level))}
        assert captured == ({"graph_level"} if name == "FLASHINFER" else set())
    unclean = backend.rejections(base.replace(clean_cache=False))
    assert [reason.feature for reason in unclean] == (["clean_cache"] if name == "FLASH_ATTN" else [])
    older = base.replace(capability=(8, 0))
    assert bool(backend.rejections(older)) == (name != "FLASHINFER") or not GPU


@pytest.mark.parametrize("name", BACKENDS)
def test_random_problems(name: str) -> None:
    if not get_backend(name).availability().ok:
        pytest.skip(f"{name} is not installed")
    drawn: Counter[str] = Counter()
    for seed in range(60 if GPU else 6):
        draw = random.Random(seed)
        queries = [draw.choice((0, 1, 1, 1, 2, 3, 17)) for _ in range(draw.randint(1, 6))] + [1]
        keys = [n + draw.choice((0, 1, 31, 63, 64, 65, 150, *((900, 3000) if GPU else ()))) for n in queries]
        case = Case(
            **{**ROW, "dtype": DTYPES[seed % len(DTYPES)]},
            heads=(draw.choice((1, 5, 16, 64, 128) if GPU else (1, 5)), 1),
            block_size=64 if name == "FLASH_MLA" else draw.choice((16, 64, 100)),
            query_lens=tuple(queries),
            seq_lens=tuple(keys),
            layout=draw.choice(("NHD", "HND")),
            padding_rows=draw.choice((0, 0, 3)),
            share_blocks=draw.random() < 0.3,
            clean_cache=name == "FLASH_ATTN",
        )
        problem = make_problem(case, DEVICE, seed)
        assert not get_backend(name).rejections(problem.spec)
        check(get_backend(name), problem, f"{name}, seed {seed}: {case.query_lens}, {case.seq_lens}")
        drawn["several tokens"] += max(queries) > 1
        drawn["no tokens"] += min(queries) == 0
        drawn["padding"] += case.padding_rows > 0
    assert all(drawn[kind] for kind in ("several tokens", "no tokens", "padding")), drawn


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_decodes_by_it_and_expands_by_another(name: str) -> None:
    if not get_backend(name).availability().ok:
        pytest.skip(f"{name} is not installed")
    torch.manual_seed(0)
    sizes, kind = (4, 512, 64, 16, 16), {"dtype": DTYPES[0], "device": DEVICE}
    options: dict[str, Any] = {"block_size": 64, "clean_cache": True, "max_absorbed_len": 3, **kind}
    layers = [MLAAttention(*sizes, 0.1, backend=f"prefill=TORCH,decode={one}", **options) for one in (name, "TORCH")]
    spec = MLASpec(head_dim=576, latent_dim=512, block_size=64, dtype=DTYPES[0])
    cache = PagedKVCache.from_specs([spec], 16, device=DEVICE)
    cache.layer(0).key.normal_()
    table = torch.randperm(15)[:12].view(4, 3).add(1).int().to(DEVICE)
    common = CommonAttentionMetadata.from_lengths([1, 3, 2, 20], [90, 3, 150, 130], table, block_size=64)
    rows = (torch.randn(26, 4, 16), torch.randn(26, 4, 64), torch.randn(26, 512), torch.randn(26, 64))
    weights = layers[0].split_kv_b(torch.randn(4 * 32, 512, **kind) * 512**-0.5)
    given = [part.to(**kind) for part in rows]
    got, want = (layer(*given, *weights, cache.layer(0), common) for layer in layers)
    assert float((got - want).float().norm() / want.float().norm()) < 1e-2 and bool(torch.isfinite(got).all())
    described = layers[0].build(common).describe()
    assert described.startswith("absorbed: Flash" if name != "FLASH_ATTN" else "absorbed: FA3"), described
    assert "expanded: 20 tokens" in described


def test_flash_mla_serves_latent_attention_alone() -> None:
    (reason,) = FlashMLABackend.rejections(AttentionSpec(num_heads=8, head_dim=128, dtype=torch.bfloat16))
    assert str(reason) == "latent_dim=None (serves 512): it serves latent attention (MLA) only"
    (reason,) = FlashMLABackend.rejections(HOPPER.replace(block_size=16))
    assert str(reason) == "block_size=16 (serves 64): build the cache with block_size=64"


@ON_CPU
def test_the_order_of_latent_layers_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = select_backend(HOPPER.replace(block_size=64), "FLASH_MLA")
    assert selected.block_size == 64
    assert select_backend(HOPPER, "FLASH_MLA").block_size == 64
    half = HOPPER.replace(dtype=torch.float16, block_size=64, clean_cache=True)  # which the interpreter computes too
    monkeypatch.setattr(hopper, "why_not_on", lambda capability: "")
    assert select_backend(half).name == "TRITON" and select_backend(half).decode is select_backend(half).prefill
    assert selector._order("decode", half) == ["TRITON", "FLASH_MLA", "FLASH_ATTN", "TORCH"]
    for behind in ({"dtype": torch.float32}, {"block_size": 24}):
        order = selector._order("decode", half.replace(**behind))  # type: ignore[arg-type]
        assert order == ["FLASH_MLA", "FLASH_ATTN", "TRITON", "TORCH"], behind
    assert select_backend(half.replace(sliding_window=9, block_size=2048)).name == "TORCH"
    monkeypatch.setitem(selector.LATENT_PRIORITY, "cuda", ("FLASH_MLA", "FLASH_ATTN", "TORCH"))
    assert select_backend(half).name == "FLASH_MLA"
    assert select_backend(half.replace(block_size=None)).name == "FLASH_ATTN"
    assert select_backend(half.replace(block_size=16, clean_cache=False)).name == "TORCH"
    asked = {"backend": "prefill=TORCH,decode=FLASH_ATTN", "dtype": torch.float16}
    layer = MLAAttention(16, 512, 64, 128, 128, 0.07, clean_cache=True, **asked)
    assert layer.spec.clean_cache and layer.selection.decode.name == "FLASH_ATTN"


def written(case: Case) -> Problem:
    """A problem whose new rows are in the cache."""
    problem = make_problem(case, DEVICE)
    assert problem.key is not None and problem.cache is not None
    FlashMLABackend.impl(problem.spec).write_kv(problem.key, None, problem.cache, problem.common.slot_mapping)
    return problem


def attend(problem: Problem, built: Any) -> None:
    """By FLASH_MLA, compared with the oracle."""
    out = FlashMLABackend.impl(problem.spec).forward(AttentionCall(problem.query, problem.cache), built)
    assert_close("output", out[: len(problem.expected)], problem.expected, problem.naive)


def other_lengths(tokens: int = 1) -> tuple[Problem, Problem]:
    """Two steps of equal shapes and unequal lengths, over equal specs."""
    case = Case(**ROW, heads=(4, 1), block_size=64, query_lens=(tokens,) * 3)
    return written(case.but(seq_lens=(300, 17, 80))), written(case.but(seq_lens=(20, 290, 150)))


@ON_CPU
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_schedule_is_never_used_for_other_lengths(tokens: int) -> None:
    one, other = other_lengths(tokens)
    builder = FlashMLABackend.builder(one.spec, DEVICE)
    first, second = builder.build(one.common), builder.build(other.common)
    before = fake_flash_mla.schedules
    for problem, built in ((one, first), (other, second), (one, first), (other, second)):
        assert isinstance(built, FlashMLAMetadata) and built.tokens == tokens
        attend(problem, built)
    assert fake_flash_mla.schedules == before + 2  # all layers of a step use one


@ON_CPU
def test_a_captured_step_is_scheduled_again_for_each_replay() -> None:
    one, other = other_lengths()
    builder = FlashMLABackend.builder(one.spec, DEVICE)
    built = builder.build(one.common, capture=True)
    attend(one, built)
    assert builder.build(other.common, into=built) is built
    attend(other, built)
    few = written(Case(**ROW, heads=(4, 1), block_size=64, query_lens=(1, 1), seq_lens=(9, 200)))
    builder.build(few.common, into=built)
    query = torch.cat((few.query, few.query.new_zeros(1, *few.query.shape[1:])))
    out = FlashMLABackend.impl(few.spec).forward(AttentionCall(query, few.cache), built)
    assert_close("output", out[:2], few.expected, few.naive)
    with pytest.raises(InvalidInputError, match="into must be metadata that this builder made with capture=True"):
        builder.build(one.common, into=builder.build(one.common))


@ON_CPU
def test_a_graph_records_the_schedule_that_it_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = other_lengths()
    built = FlashMLABackend.builder(one.spec, DEVICE).build(one.common, capture=True)
    attend(one, built)  # warm-up
    before = fake_flash_mla.schedules
    monkeypatch.setattr(metadata, "_is_being_captured", lambda device: True)
    attend(one, built)
    attend(one, built)  # the second layer
    assert fake_flash_mla.schedules == before + 1
    monkeypatch.setattr(metadata, "_is_being_captured", lambda device: False)
    attend(one, built)
    assert fake_flash_mla.schedules == before + 2


@ON_CPU
def test_steps_go_to_the_kernel_as_they_are_where_it_can_take_them() -> None:
    case = Case(**ROW, heads=(4, 1), block_size=64)
    expected = {
        ((1, 1), (5, 70)): (1, 2),
        ((3, 3), (5, 70)): (3, 2),
        ((3, 3), (5, 2)): (1, 6),  # rows without keys
        ((2, 1), (5, 70)): (1, 3),
        ((1, 0), (5, 0)): (1, 1),
    }
    for (queries, keys), (tokens, count) in expected.items():
        problem = written(case.but(query_lens=queries, seq_lens=keys))
        builder = FlashMLABackend.builder(problem.spec, DEVICE)
        built = builder.build(problem.common)
        assert isinstance(built, FlashMLAMetadata) and (built.tokens, len(built.seq_lens)) == (tokens, count), queries
        attend(problem, built)
        unknown = builder.build(problem.common.replace(seq_lens_cpu=None, num_decodes=0))
        assert isinstance(unknown, FlashMLAMetadata) and len(unknown.seq_lens) == sum(queries)
        assert ("each token as one of its own" in unknown.describe()) == (len(unknown.seq_lens) != len(queries))
        attend(problem, unknown)
    problem = written(case.but(query_lens=(1, 0, 1), seq_lens=(5, 9, 7)))
    for host in (problem.common, problem.common.replace(seq_lens_cpu=None, query_start_loc_cpu=None)):
        padded = host.replace(num_decodes=3)  # of which one is padding, without a new token
        attend(problem, FlashMLABackend.builder(problem.spec, DEVICE).build(padded))


def test_each_token_sees_the_keys_up_to_its_own() -> None:
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    common = CommonAttentionMetadata.from_lengths([2, 0, 3], [9, 4, 2], table, block_size=64)
    lens, tables = sequences_of_tokens(common.replace(num_tokens=7), causal=True)
    assert lens.tolist() == [8, 9, 0, 1, 2, 0, 0] and lens.dtype == torch.int32
    assert tables[:5].tolist() == [[0, 1], [0, 1], [4, 5], [4, 5], [4, 5]]
    lens, _ = sequences_of_tokens(common, causal=False)
    assert lens.tolist() == [9, 9, 2, 2, 2]


@ON_CPU
def test_wrong_calls_are_refused_by_name() -> None:
    problem = written(Case(**ROW, heads=(4, 1), block_size=64, query_lens=(1, 1), seq_lens=(5, 70)))
    impl = FlashMLABackend.impl(problem.spec)
    built = FlashMLABackend.builder(problem.spec, DEVICE).build(problem.common)
    assert problem.cache is not None
    small = problem.cache.key[:, :16]
    for call, text in {
        AttentionCall(problem.query): "kv_cache must be a cache of latent rows, got None",
        AttentionCall(problem.query, LayerCache(small, small)): "kv_cache must be blocks of 64 tokens, got 16",
        AttentionCall(problem.query[:1], problem.cache): "query must be at least 2 rows, as the metadata says, got 1",
    }.items():
        with pytest.raises(InvalidInputError, match=text):
            impl.forward(call, built)
    other = get_backend("FLASHINFER").builder(problem.spec, DEVICE).build(problem.common)
    with pytest.raises(InvalidInputError, match="metadata must be of FLASH_MLA, got FlashInferMetadata"):
        impl.forward(AttentionCall(problem.query, problem.cache), other)
    backend, spec = get_backend("FLASH_ATTN"), problem.spec.replace(clean_cache=True)
    planned = backend.builder(spec, DEVICE).build(problem.common)
    packed = AttentionCall(problem.query, None, problem.key, problem.key)
    with pytest.raises(InvalidInputError, match="kv_cache must be a cache of latent rows, got None"):
        backend.impl(spec).forward(packed, planned)


@ON_CPU
def test_flashinfer_plans_a_step_once_and_again_where_another_replaced_it() -> None:
    case = Case(**ROW, heads=(4, 1), query_lens=(1, 3), seq_lens=(20, 37))
    problem = written(case)
    backend = get_backend("FLASHINFER")
    builder, impl = backend.builder(problem.spec, DEVICE), backend.impl(problem.spec)
    built, call = builder.build(problem.common), AttentionCall(problem.query, problem.cache)
    assert isinstance(built, FlashInferMetadata) and built.describe() == "FlashInfer latent fa2, 2 sequences"
    first = impl.forward(call, built)
    builder.build(problem.common.replace(seq_lens=problem.common.seq_lens - 1, seq_lens_cpu=None))
    assert torch.equal(impl.forward(call, built), first)
    with pytest.raises(UnsupportedError, match="FLASHINFER captures no latent attention"):
        builder.build(problem.common, capture=True)


@ON_CPU
def test_a_wrapper_of_latent_rows_follows_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedattn.backends.flashinfer import plan

    problem = written(Case(**ROW, heads=(4, 1), query_lens=(1, 1), seq_lens=(20, 37)))
    backend = get_backend("FLASHINFER")
    builder = backend.builder(problem.spec, DEVICE)
    built = builder.build(problem.common)
    assert isinstance(built, FlashInferMetadata)
    ((part,),) = built.planned.values()
    before = part.slot.wrapper
    plan.shared_workspace(DEVICE).grow(2 << 20)
    assert part.wrapper() is before
    builder.build(problem.common)
    assert part.wrapper() is not before and part.slot.wrapper.workspace is plan.shared_workspace(DEVICE).buffer
