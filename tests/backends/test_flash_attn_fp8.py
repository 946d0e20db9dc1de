"""FLASH_ATTN over fp8 caches: what it hands to FlashAttention 3, what it refuses, and what the kit allows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends.fake_flash_attn import CALLS, MODULES
from covers import values

from pagedattn import AttentionCall, AttentionSpec, select_backend
from pagedattn.backends import selector
from pagedattn.backends.flash_attn import FlashAttnBackend, versions
from pagedattn.backends.flash_attn.queries import quantise_queries
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.spec import Capabilities
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import Problem, make_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H200: dict[str, Any] = {"device_type": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "clean_cache": True}
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, kv_cache_dtype="fp8", **H200)
CASE = Case(dtype=torch.bfloat16, clean_cache=True, head_dim=64, kv_cache_dtype="fp8_e4m3", kv_scale="head")


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in of FlashAttention 3 alone is installed."""
    for modules in MODULES.values():
        for name in modules:
            monkeypatch.setitem(sys.modules, name, MODULES[3].get(name))
    monkeypatch.setattr(versions, "_installed", lambda name: sys.modules.get(name) is not None)
    monkeypatch.setattr(versions, "release_of", {"flash-attn-3": "3.0.0"}.get)
    monkeypatch.delenv("PAGEDATTN_FLASH_ATTN", raising=False)
    versions.library.cache_clear()
    CALLS.clear()
    yield
    versions.library.cache_clear()


@pytest.fixture
def on_cpu(fa3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be refused."""
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])


def reasons(**changes: Any) -> list[str]:
    return [str(one) for one in FlashAttnBackend.rejections(SPEC.replace(**changes))]


@pytest.mark.usefixtures("fa3")
def test_what_it_serves_and_refuses() -> None:
    for kind in ("none", "float", "tensor", "head"):
        assert reasons(kv_scale=kind) == []
    for served in ({"softcap": 9.0}, {"sliding_window": 20}, {"causal": False}, {"needs_lse": True}, {"head_dim": 80}):
        assert reasons(**served) == []
    assert reasons(cache_layout="HND", dtype=torch.float16) == []
    for form in ("fp8_e5m2", "int8"):
        (why,) = reasons(kv_cache_dtype=form)
        hint = "FlashAttention 3 reads 8-bit caches of e4m3 only, and no such latent rows"
        assert why == f"kv_cache_dtype={form} (serves auto, fp8_e4m3): {hint}"
    (why,) = reasons(head_dim=72)
    assert why.startswith("head_dim=72 (serves multiples of 16 over fp8 caches)")
    assert reasons(head_dim=72, kv_cache_dtype="auto") == []


def test_flash_attention_2_reads_no_fp8_caches() -> None:
    refused = versions.FA2.rejections(SPEC.replace(block_size=256))
    assert [one.feature for one in refused] == ["kv_cache_dtype"]


@pytest.mark.usefixtures("fa3")
def test_it_serves_fp8_caches_only_where_it_is_asked_for() -> None:
    for phase in ("prefill", "decode"):
        for spec in (SPEC, SPEC.replace(dtype=torch.float16), SPEC.replace(head_dim=96)):
            assert selector._order(phase, spec)[-1] == "FLASH_ATTN"
    assert selector._order("prefill", SPEC.replace(kv_cache_dtype="auto", head_dim=96))[0] == "FLASH_ATTN"
    unasked = select_backend(SPEC.replace(dtype=torch.float16))  # the interpreter has no bfloat16
    assert unasked.name == "TRITON"
    assert "not FLASH_ATTN: lower priority, as it rounds queries and probabilities to fp8" in unasked.describe()
    assert select_backend(SPEC, "FLASH_ATTN").served_by == "FLASH_ATTN (FA3 via flash_attn_interface)"


@pytest.mark.usefixtures("fa3")
def test_it_serves_fp8_caches_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = selector._reasons
    refused = alone("FLASH_ATTN", SPEC.replace(head_dim=72))
    monkeypatch.setattr(selector, "_reasons", lambda name, spec: () if name == "FLASH_ATTN" else refused)
    assert select_backend(SPEC).name == "FLASH_ATTN"


def run(case: Case, problem: Problem | None = None) -> dict[str, Any]:
    """What FlashAttention was called with."""
    CALLS.clear()
    check(FlashAttnBackend, make_problem(case) if problem is None else problem, case.id)
    (call,) = CALLS
    return call


@pytest.mark.usefixtures("on_cpu")
def test_all_cases_of_the_kit_conform() -> None:
    cases = [one for one in CASES if one.kv_cache_dtype == "fp8_e4m3" and one.head_dim % 16 == 0]
    cases = [one.but(clean_cache=True) for one in cases if one.head_dim_v is None]
    assert len(cases) >= 11 and {one.kv_scale for one in cases} == {"none", "float", "tensor", "head"}
    more = (CASE.but(layout="HND"), CASE.but(fused_qkv=True, padding_rows=3), CASE.but(causal=False, sliding_window=9))
    more += (CASE.but(query_lens=(0, 3, 1), seq_lens=(0, 3, 200)), CASE.but(query_lens=(200, 1), seq_lens=(200, 30)))
    for case in (*cases, *more):
        for dtype in (torch.bfloat16, torch.float16):
            assert run(case.but(dtype=dtype))["query"].dtype == torch.float8_e4m3fn, case.id


@pytest.mark.parametrize("kind", ["none", "float", "tensor", "head"])
@pytest.mark.usefixtures("on_cpu")
def test_descales_are_the_layers_scales(kind: str) -> None:
    problem = make_problem(CASE.but(kv_scale=kind))
    _, *descales = run(problem.case, problem)["descales"]
    for got, side in zip(descales, problem.stored, strict=True):
        scale = 1.0 if side.scale is None else side.scale
        assert torch.equal(got, torch.as_tensor(scale).expand(3, 2))
        if isinstance(scale, torch.Tensor):
            assert got.data_ptr() == scale.data_ptr() and got.stride(0) == 0, "a scale tensor was copied"


@pytest.mark.usefixtures("on_cpu")
def test_output_is_of_the_querys_dtype() -> None:
    problem = make_problem(CASE.but(dtype=torch.float16, write=False, lse=False))
    metadata = FlashAttnBackend.builder(problem.spec, torch.device("cpu")).build(problem.common)
    assert metadata.describe() == "FA3 via flash_attn_interface, 3 sequences, up to 17 queries, fp8 queries"
    k_scale, v_scale = (side.scale for side in problem.stored)
    call = AttentionCall(problem.query, problem.cache, k_scale=k_scale, v_scale=v_scale)
    impl = FlashAttnBackend.impl(problem.spec)
    assert impl.forward(call, metadata).dtype == torch.float16
    with pytest.raises(InvalidInputError, match=r"^k_scale must be float32 with 1 or 2 elements"):
        impl.forward(call._replace(k_scale=torch.ones(3)), metadata)
    other = FlashAttnBackend.impl(problem.spec.replace(kv_scale="none"))
    with pytest.raises(UnsupportedError, match=r"must announce them \(kv_scale\)"):
        other.forward(call, metadata)


@pytest.mark.usefixtures("on_cpu")
def test_keys_of_a_call_without_a_cache_are_not_quantised() -> None:
    assert run(CASE.but(paged=False, seq_lens=(5, 1, 17), kv_scale="none"))["call"] == "fa2 varlen"


@pytest.mark.usefixtures("on_cpu")
def test_the_kit_gives_no_other_backend_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = replace(versions.FA3.capabilities, fp8_queries=False)
    monkeypatch.setattr(FlashAttnBackend, "capabilities", classmethod(lambda cls: exact))
    with pytest.raises(AssertionError, match=r"max error|relative error"):
        run(CASE)
    served = [one.capabilities for one in (versions.FA2, versions.FA3)]
    assert [one.rounds_queries(SPEC) for one in served] == [False, True]
    assert not served[1].rounds_queries(SPEC.replace(kv_cache_dtype="auto"))
    assert not Capabilities.__dataclass_fields__["fp8_queries"].default


@pytest.mark.cover(by=values)
@pytest.mark.parametrize("lens", [(1, 1, 1), (5, 0, 300), (600,), (2, 4000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_both_paths_quantise_alike(lens: tuple[int, ...], dtype: torch.dtype) -> None:
    generator, total = torch.Generator().manual_seed(0), sum(lens)
    query = torch.randn(total + 3, 12, 96, generator=generator, dtype=dtype)[:, :8, :80]  # strided, and padded
    query[total:] = torch.nan
    query[: lens[0], :4] = 0
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    given = (query.to(DEVICE), starts.to(DEVICE), 2, max(lens), 0.5, 2.0)
    codes, descales = quantise_queries(*given, path="torch")
    ours, factors = quantise_queries(*given, path="triton")
    assert torch.equal(codes[:total].view(torch.uint8), ours[:total].view(torch.uint8))
    assert torch.equal(descales, factors) and descales.shape == (3, len(lens), 2)
    assert bool((factors[1] == 0.5).all()) and bool((factors[2] == 2.0).all()) and bool((factors[0, 0, :1] == 1).all())
    for seq, rows in enumerate(query[:total].split(lens)):
        largest = rows.float().unflatten(1, (2, 4)).abs().amax((0, 2, 3)) if len(rows) else torch.zeros(2)
        assert torch.equal(factors[0, seq].cpu(), torch.where(largest == 0, 1.0, largest / 448))
    read = ours[:total].float().cpu().unflatten(1, (2, 4))
    read *= factors[0].cpu().repeat_interleave(torch.tensor(lens), 0)[:, :, None, None]
    assert float((read.flatten(1, 2) - query[:total]).abs().max()) < 2.0**-4 * float(query[:total].abs().max())
