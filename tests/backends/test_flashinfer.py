"""FLASHINFER: the adapter computes the oracle's answer through a stand-in of the library, which refuses its traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_facets import facets_by_dtype
from flashinfer_on_cpu import CPU, ENDS, HALF, OnCpu, attend, builder_of, install, written

import pagedattn.backends.flashinfer.backend as adapter
from pagedattn import AttentionCall, AttentionSpec, AttentionType
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.registry import get_backend
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.base import LayerCache
from pagedattn.spec import GraphLevel
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import Problem, make_problem

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, device_type="cuda", capability=(9, 0)
)


def variants(*shapes: tuple[int, torch.dtype]) -> list[Case]:
    """The suite's cases with head dims and dtypes that the library serves."""
    cases = [case.but(head_dim=dim, dtype=dtype, head_dim_v=None) for case in CASES for dim, dtype in shapes]
    return list(dict.fromkeys(cases))


def refused(case: Case) -> set[str]:
    """What the adapter refuses of a case, were the library installed."""
    return {reason.feature for reason in OnCpu.rejections(case.spec(CPU))} - {"availability"}


VARIANTS = variants((64, torch.float16), (128, torch.bfloat16))
SERVED = [case for case in VARIANTS if not refused(case)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


NEWEST = SERVED[::4]  # the stand-ins of the two ends differ in rows without keys only, as test_flashinfer_plan.py has
BOTH_ENDS = [*((ENDS[0], case) for case in SERVED), *((ENDS[1], case) for case in NEWEST)]


@pytest.mark.cover(by=lambda release, case: [(release, one) for one in facets_by_dtype(case)])
@pytest.mark.parametrize(("release", "case"), BOTH_ENDS, ids=[f"{r}-{c.id}-{c.dtype}" for r, c in BOTH_ENDS])
def test_it_is_the_oracle(release: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, release)
    check(OnCpu, make_problem(case), case.id)


@pytest.mark.usefixtures("fake")
def test_serves_all_it_must() -> None:
    ran = [case for case in SERVED if not OnCpu.rejections(case.spec(CPU))]
    assert len(ran) == len(SERVED) >= 190
    others = [case for case in VARIANTS if not OnCpu.capabilities().rejections(case.spec(CPU)) and case not in ran]
    assert set().union(*map(refused, others)) == {"sliding_window", "scale", "kv_cache_dtype"}
    for wanted in ("sliding_window", "softcap", "lse", "padding_rows", "fused_qkv", "share_blocks"):
        assert any(getattr(case, wanted) for case in ran), wanted
    assert {case.layout for case in ran} == {"NHD", "HND"} and {case.paged for case in ran} == {True, False}
    assert {case.attn_type for case in ran} >= {AttentionType.CROSS, AttentionType.ENCODER, AttentionType.ENCODER_ONLY}
    assert {case.heads[0] // case.heads[1] for case in ran} >= {1, 2, 4, 5, 7, 8, 16}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"device_type": "cpu"}, "device_type"),
        ({"capability": (7, 5)}, "capability"),
        ({"head_dim": 96}, "head_dim"),
        ({"head_dim_v": 64}, "head_dim_v"),
        ({"has_alibi": True}, "has_alibi"),
        ({"has_sinks": True}, "has_sinks"),
        ({"deterministic": True}, "deterministic"),
        ({"compile": True}, "compile"),
        ({"mask_mod": torch.ge}, "mask_mod"),
        ({"graph_level": GraphLevel.UNIFORM_BATCH}, "graph_level"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8", "kv_scale": "head"}, "kv_scale"),
        ({"kv_cache_dtype": "fp8", "head_dim": 64}, "kv_cache_dtype"),
        ({"causal": False, "sliding_window": 9}, "sliding_window"),
        ({"scale": -0.3}, "scale"),
        ({"scale": 1e-4}, "scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_serve_is_refused_by_name(changes: dict[str, Any], feature: str) -> None:
    assert not adapter.FlashInferBackend.rejections(SPEC)
    assert feature in {reason.feature for reason in adapter.FlashInferBackend.rejections(SPEC.replace(**changes))}


@pytest.mark.parametrize(
    ("found", "reason", "hint"),
    [
        ({}, "flashinfer is not installed", "pip install 'flashinfer-python>=0.6.13,<0.8'"),
        ({"other": "1"}, "no distribution flashinfer-python", "<0.8'"),
        ({"flashinfer-python": "0.6.12.post9"}, "0.6.12.post9 is older than 0.6.13", "<0.8'"),
        ({"flashinfer-python": "0.8.0"}, "newer series than 0.7.2.post1, the newest tried", "<0.8'"),
        (
            {"flashinfer-python": "0.6.13", "flashinfer-cubin": "0.6.12"},
            "flashinfer-cubin 0.6.12 is not of flashinfer-python 0.6.13, which then fails to import",
            "pip install flashinfer-cubin==0.6.13, or uninstall it",
        ),
        (
            {"flashinfer-python": "0.7.0", "flashinfer-jit-cache": "0.6.13+cu130"},
            "flashinfer-jit-cache 0.6.13+cu130",
            "",
        ),
        ({"flashinfer-python": "0.6.13", "flashinfer-jit-cache": "0.6.13+cu130"}, "", ""),
        ({"flashinfer-python": "0.7.2.post1", "flashinfer-cubin": "0.6.13"}, "", ""),
        ({"flashinfer-python": "0.7.9"}, "", ""),
    ],
    ids=str,
)
def test_availability_says_why_not(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], reason: str, hint: str
) -> None:
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    monkeypatch.setattr(adapter, "find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(adapter, "release_of", found.get)
    state = adapter._availability.__wrapped__()
    assert state.ok == (not reason) and reason in state.reason and hint in state.hint
    if state.ok:
        assert state.version == f"{found['flashinfer-python']} (serves 0.6.13 to 0.7.2.post1)"
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert adapter._availability.__wrapped__().ok == (state.ok or len(found) > 1)


def test_it_is_registered() -> None:
    assert get_backend("FLASHINFER") is adapter.FlashInferBackend


def parts_of(case: Case) -> tuple[Problem, Any, Any]:
    problem = written(case)
    return problem, OnCpu.impl(problem.spec), builder_of(problem)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [((90, 5), (80, 9)), ((2, 1, 3), (0, 9, 0)), ((2, 3), (0, 0)), ((0, 0), (4, 3))])
def test_packed_keys_of_any_lengths(lens: tuple[tuple[int, ...], tuple[int, ...]], causal: bool) -> None:
    kind = AttentionType.DECODER if causal else AttentionType.ENCODER
    problem = written(Case(**HALF, query_lens=lens[0], seq_lens=lens[1], paged=False, attn_type=kind, padding_rows=3))
    assert problem.key is not None and len(problem.key) == sum(lens[1]) + 3
    attend(problem, builder_of(problem).build(problem.common))


@pytest.mark.usefixtures("fake")
def test_outputs_and_queries_that_kernels_cannot_touch_go_through_copies() -> None:
    problem, impl, builder = parts_of(Case(**HALF, padding_rows=2))
    metadata = builder.build(problem.common)
    want = impl.forward(AttentionCall(problem.query, problem.cache), metadata)
    misaligned = torch.empty(problem.query.numel() + 1, dtype=torch.float16)[1:].view(problem.query.shape)
    misaligned.copy_(problem.query)
    wide = torch.zeros(*problem.query.shape[:2], 2 * 64, dtype=torch.float16)
    strided = wide[..., :64]
    out = impl.forward(AttentionCall(misaligned, problem.cache, out=strided), metadata)
    assert out is strided
    assert torch.equal(out[:-2], want[:-2]) and not out[-2:].any() and not wide[..., 64:].any()
    kept = torch.full_like(problem.query, 7.0)
    out = impl.forward(AttentionCall(problem.query, problem.cache, out=kept), metadata)
    assert out is kept and torch.equal(out[:-2], want[:-2]) and bool((out[-2:] == 7).all())


@pytest.mark.usefixtures("fake")
def test_what_the_kernels_would_ignore_or_misread_is_an_error() -> None:
    problem, impl, builder = parts_of(Case(**HALF))
    metadata, cache = builder.build(problem.common), problem.cache
    assert cache is not None
    call = AttentionCall(problem.query, cache)
    for name in ("sinks", "alibi_slopes"):
        with pytest.raises(UnsupportedError, match=name):
            impl.forward(call._replace(**{name: torch.zeros(4)}), metadata)
    with pytest.raises(InvalidInputError, match="k_scale must be None"):
        impl.forward(call._replace(k_scale=0.5), metadata)
    apart = torch.empty_strided(cache.value.shape, [2 * s for s in cache.value.stride()[:3]] + [1], dtype=torch.float16)
    with pytest.raises(InvalidInputError, match="equal strides"):
        impl.forward(call._replace(kv_cache=LayerCache(cache.key, apart)), metadata)
    with pytest.raises(InvalidInputError, match="at least 23 rows"):
        impl.forward(call._replace(query=problem.query[:20]), metadata)
    with pytest.raises(InvalidInputError, match="key and value"):
        impl.forward(AttentionCall(problem.query), metadata)
    with pytest.raises(InvalidInputError, match=r"^metadata must be of FLASHINFER, got AttentionMetadata; build it"):
        impl.forward(call, AttentionMetadata(problem.common))


@pytest.mark.usefixtures("fake")
def test_fp8_scales_are_host_floats_and_not_too_small() -> None:
    case = Case(head_dim=128, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", kv_scale="float")
    check(OnCpu, make_problem(case), "fp8")
    problem = make_problem(case)
    impl, metadata = OnCpu.impl(problem.spec), OnCpu.builder(problem.spec, CPU).build(problem.common)
    call = AttentionCall(problem.query, problem.cache)
    with pytest.raises(InvalidInputError, match="k_scale must be a host float"):
        impl.forward(call._replace(k_scale=torch.ones(1)), metadata)
    with pytest.raises(InvalidInputError, match="k_scale must be at least"):
        impl.forward(call._replace(k_scale=1e-3), metadata)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("heads", "kernel"), [((4, 2), "CUDA cores"), ((6, 2), "tensor"), ((5, 1), "tensor")])
def test_describe_says_which_wrapper_and_kernel(heads: tuple[int, int], kernel: str) -> None:
    lens = {"query_lens": (1, 1, 4, 3), "seq_lens": (20, 30, 4, 9), "heads": heads}
    problem, _, builder = parts_of(Case(**HALF, **lens))
    text = builder.build(problem.common).describe()
    assert text.startswith("FlashInfer decode ") and kernel in text and "2 sequences; prefill fa2, 2 sequences" in text
    dense = make_problem(Case(**HALF, paged=False, seq_lens=(5, 1, 17)))
    metadata = OnCpu.builder(dense.spec, CPU).build(dense.common)
    assert metadata.describe() == "FlashInfer plans at first use"
    OnCpu.impl(dense.spec).forward(AttentionCall(dense.query, None, dense.key, dense.value), metadata)
    assert metadata.describe() == "FlashInfer dense fa2, 3 sequences"


ON_GPU = torch.cuda.is_available() and adapter.FlashInferBackend.availability().ok


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs FlashInfer and a GPU")
@pytest.mark.parametrize("case", variants((128, torch.bfloat16)) if ON_GPU else [], ids=lambda case: case.id)
def test_the_library_itself_is_the_oracle(case: Case) -> None:
    device = torch.device("cuda")
    reasons = adapter.FlashInferBackend.rejections(case.spec(device))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    check(adapter.FlashInferBackend, make_problem(case, device), case.id)
