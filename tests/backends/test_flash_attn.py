"""The FLASH_ATTN adapter against stand-ins that compute by definition: arguments, conventions, versions, capture."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backends.fake_flash_attn import CALLS, MODULES, fa3_of_2_8_0, fa3_of_2_8_3

from pagedattn import AttentionCall, AttentionSpec, CommonAttentionMetadata, Mask, select_backend
from pagedattn.backends.base import AttentionMetadata
from pagedattn.backends.flash_attn import FlashAttnBackend
from pagedattn.backends.flash_attn import versions as versions
from pagedattn.backends.flash_attn.metadata import FlashAttnMetadata
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

GPU: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16}
H200 = {**GPU, "capability": (9, 0)}
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes stand-ins of these versions importable, and no others; `releases` says which, the newest served if not."""

    def run(*numbers: int, releases: dict[str, str] | None = None) -> None:
        for modules in MODULES.values():
            for name in modules:
                monkeypatch.setitem(sys.modules, name, None)
        for number in numbers:
            for name, module in MODULES[number].items():
                monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(versions, "_installed", lambda name: sys.modules.get(name) is not None)
        newest = {one.releases.distribution: one.releases.newest for one in versions.VERSIONS if one.number in numbers}
        monkeypatch.setattr(versions, "release_of", (newest if releases is None else releases).get)
        versions.library.cache_clear()
        CALLS.clear()

    yield run
    versions.library.cache_clear()


def served(number: int) -> list[Case]:
    """Cases that the version serves on its own GPU, small ones, in bfloat16 with blocks it takes."""
    version = next(one for one in versions.VERSIONS if one.number == number)
    out = []
    for case in CASES:
        size = 256 if number == 2 and case.block_size == 16 else case.block_size
        clean = version.capabilities.needs_clean_cache or case.sliding_window is not None
        case = case.but(dtype=torch.bfloat16, block_size=size, clean_cache=clean)
        spec = case.spec(torch.device("cpu")).replace(**H200)
        if not version.rejections(spec) and case.head_dim <= 128:
            out.append(case)
    return out


@pytest.mark.parametrize(
    ("number", "found", "text"),
    [
        (2, "2.8.0.post2", ""),
        (2, "2.8.3.post2", ""),
        (2, "2.8.9", ""),
        (2, None, ""),  # built without a distribution
        (2, "2.7.4.post1", "flash-attn 2.7.4.post1 is older than 2.8.0.post2"),
        (2, "2.9.0", "flash-attn 2.9.0 is of a newer series than 2.8.3.post2, the newest tried"),
        (3, "3.0.0b1", ""),
        (3, "3.1.0", "flash-attn-3 3.1.0 is of a newer series"),
        (3, "3.0.0b0", "flash-attn-3 3.0.0b0 is older than 3.0.0b1"),
    ],
)
def test_releases_that_are_not_served_are_refused(
    number: int, found: str | None, text: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = next(one for one in versions.VERSIONS if one.number == number)
    install(number, releases={} if found is None else {version.releases.distribution: found})
    state = FlashAttnBackend.availability()
    served = f"{version.label} {found or 'unknown version'} (serves {version.releases})"
    assert (state.ok, state.version) == ((False, "") if text else (True, served))
    assert text in state.reason and (not text or version.install in state.hint)
    assert version.releases.requirement in version.install or number == 3
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", str(number))
    reasons = FlashAttnBackend.rejections(spec(block_size=256, clean_cache=True))
    assert [reason.feature for reason in reasons] == (["availability"] if text else [])
    if text:
        for refused in (lambda: FlashAttnBackend.impl(spec(block_size=256)), lambda: versions.library(version)):
            with pytest.raises(UnsupportedError, match=text):
                refused()


def test_a_release_that_is_refused_is_named_beside_one_that_serves(install: Install) -> None:
    install(2, 3, releases={"flash-attn": "2.7.4.post1"})
    state = FlashAttnBackend.availability()
    assert state.ok and state.version.startswith("FA3 unknown") and "2.7.4.post1 is older" in state.reason
    assert FlashAttnBackend.variant(spec(clean_cache=True)).startswith("FA3")
    assert not FlashAttnBackend.variant(spec(block_size=256))


def test_a_version_asked_for_that_is_not_there_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(2, releases={"flash-attn": "2.8.3.post2"})
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", "3")
    (only,) = FlashAttnBackend.rejections(spec(block_size=256, clean_cache=True))
    assert only.feature == "availability" and "found FA2 2.8.3.post2" in str(only)
    assert "PAGEDATTN_FLASH_ATTN" in only.hint
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", "2")
    assert FlashAttnBackend.rejections(spec(block_size=256, clean_cache=True)) == []


def test_a_package_without_the_compiled_kernels_is_not_flash_attention_2(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other distributions bring a package `flash_attn` too."""
    install()
    monkeypatch.setitem(sys.modules, "flash_attn", MODULES[2]["flash_attn"])
    (only,) = FlashAttnBackend.rejections(spec(block_size=256))
    assert only.feature == "availability" and not FlashAttnBackend.availability().ok


@pytest.mark.parametrize("older", [fa3_of_2_8_0, fa3_of_2_8_3])
def test_older_builds_of_flash_attention_3_serve_packed_keys(
    older: Any, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(3)
    monkeypatch.setattr(MODULES[3]["flash_attn_interface"], "flash_attn_varlen_func", older)
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    case = Case(dtype=torch.bfloat16, clean_cache=True, head_dim=64, paged=False)
    check(FlashAttnBackend, make_problem(case.but(lse=False)), "without LSE")
    if older is fa3_of_2_8_0:
        check(FlashAttnBackend, make_problem(case), "with LSE")
        return
    with pytest.raises(UnsupportedError, match="this build of FlashAttention 3 returns no LSE of attention without"):
        check(FlashAttnBackend, make_problem(case), "with LSE")


@pytest.mark.parametrize(("number", "at_least"), [(2, 70), (3, 90)])
def test_conforms(number: int, at_least: int, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(number)
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", str(number))
    cases = served(number)
    assert len(cases) >= at_least
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])  # on a CPU none would be picked
    for case in cases:
        check(FlashAttnBackend, make_problem(case), f"FA{number} {case.id}")
    assert len(CALLS) > at_least // 2


def spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, **{**H200, "block_size": 16, **changes})


def test_the_best_version_that_serves_is_named(install: Install) -> None:
    install(2, 3)
    clean = spec(clean_cache=True)
    assert FlashAttnBackend.variant(clean) == "FA3 via flash_attn_interface"
    assert "FLASH_ATTN (FA3 via flash_attn_interface)" in select_backend(clean, "FLASH_ATTN").describe()
    assert FlashAttnBackend.variant(spec(block_size=256)) == "FA2 via flash_attn"  # FA3 wants a clean cache
    assert FlashAttnBackend.variant(spec(block_size=256, clean_cache=True, has_alibi=True)) == "FA2 via flash_attn"
    assert select_backend(spec(block_size=None), "FLASH_ATTN").block_size == 256
    older = spec(block_size=256, clean_cache=True, capability=(8, 0))
    assert FlashAttnBackend.variant(older) == "FA2 via flash_attn"


def test_every_installed_version_says_why_not(install: Install) -> None:
    install(2, 3)
    reasons = "\n".join(map(str, FlashAttnBackend.rejections(spec(has_alibi=True, clean_cache=True))))
    assert "has_alibi=True (serves FA3: none)" in reasons and "block_size=16 (serves FA2: multiples of 256" in reasons
    install()
    (only,) = FlashAttnBackend.rejections(spec())
    assert only.feature == "availability" and "pip install flash-attn" in only.hint


def test_fa2_refuses_to_reread_the_cache_per_head(install: Install) -> None:
    install(2)
    one_per_head = spec(block_size=256, mask=Mask(sliding_window=9)).replace(num_kv_heads=8)
    assert [reason.feature for reason in FlashAttnBackend.rejections(one_per_head)] == ["clean_cache"]
    wide = spec(block_size=256, mask=Mask(sliding_window=100), clean_cache=True)
    assert [reason.feature for reason in FlashAttnBackend.rejections(wide)] == ["sliding_window"]
    assert FlashAttnBackend.rejections(wide.replace(num_kv_heads=8)) == []


def test_a_library_that_does_not_load_is_named(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(3)
    monkeypatch.setattr(versions, "import_module", _broken)
    with pytest.raises(UnsupportedError, match=r"FA3 .* cannot be loaded: undefined symbol"):
        FlashAttnBackend.impl(spec(clean_cache=True))


def test_a_library_that_is_not_there_is_named_too(install: Install) -> None:
    install(2)
    with pytest.raises(UnsupportedError, match=r"FA3 needs the module flash_attn_3\.flash_attn_interface or .*; build"):
        versions.library(versions.FA3)


def _broken(name: str) -> None:
    raise ImportError("undefined symbol")


def step(lens: list[int]) -> CommonAttentionMetadata:
    table = torch.arange(len(lens) * 4, dtype=torch.int32).view(-1, 4)
    return CommonAttentionMetadata.from_lengths([1] * len(lens), lens, table, num_decodes=len(lens))


def test_captured_schedules_are_rewritten_in_place(install: Install) -> None:
    install(3)
    builder = FlashAttnBackend.builder(spec(clean_cache=True), torch.device("cpu"))
    captured = builder.build(step([64, 64, 64]), capture=True)
    assert isinstance(captured, FlashAttnMetadata) and captured.schedule is not None
    schedule = captured.schedule
    where = schedule.data_ptr()
    assert builder.build(step([5, 17, 0]), into=captured) is captured
    assert schedule.data_ptr() == where and schedule.tolist() == [3, 16, 32, 2, 64, 64, 5, 17, 0]
    with pytest.raises(CapacityError, match="num_seqs is 4"):
        builder.build(step([5, 17, 1, 1]), into=captured)


def test_what_a_step_runs_is_told(install: Install) -> None:
    install(3)
    builder = FlashAttnBackend.builder(spec(clean_cache=True), torch.device("cpu"))
    assert builder.build(step([5, 6])).describe() == "FA3 via flash_attn_interface, 2 sequences, decode"


def test_zeros_between_decodes_are_not_replayed_by_fa2(install: Install) -> None:
    install(2)
    builder = FlashAttnBackend.builder(spec(block_size=256), torch.device("cpu"))
    captured = builder.build(step([64, 64, 64]), capture=True)
    table = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="sort sequences without a new token last"):
        builder.build(CommonAttentionMetadata.from_lengths([1, 0, 1], [9, 8, 7], table), captured)
    assert builder.build(CommonAttentionMetadata.from_lengths([1, 1, 0], [9, 8, 0], table), captured) is captured


def test_a_version_is_settled_when_a_layer_is_built(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(2, 3)
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", "2")
    problem = make_problem(Case(block_size=256, dtype=torch.bfloat16, clean_cache=True, head_dim=64))
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    impl, builder = FlashAttnBackend.impl(problem.spec), FlashAttnBackend.builder(problem.spec, torch.device("cpu"))
    monkeypatch.delenv("PAGEDATTN_FLASH_ATTN")
    metadata = builder.build(problem.common)
    assert metadata.describe().startswith("FA2")
    copy.deepcopy(impl).forward(AttentionCall(problem.query, problem.cache), metadata)
    assert CALLS[-1]["call"] == "fa2 varlen"


def test_what_the_spec_did_not_announce_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(3)
    problem = make_problem(Case(dtype=torch.bfloat16, clean_cache=True, head_dim=64))
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    impl = FlashAttnBackend.impl(problem.spec)
    metadata = FlashAttnBackend.builder(problem.spec, torch.device("cpu")).build(problem.common)
    call = AttentionCall(problem.query, problem.cache)
    for name in ("sinks", "alibi_slopes"):
        with pytest.raises(InvalidInputError, match=rf"^{name} must be None, as the spec announces none"):
            impl.forward(call._replace(**{name: torch.ones(4)}), metadata)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(UnsupportedError, match=r"^FLASH_ATTN was told of no scales; .*\(kv_scale\)"):
            impl.forward(call._replace(**{name: 0.5}), metadata)
    with pytest.raises(InvalidInputError, match=r"^key and value must be given where there is no kv_cache"):
        impl.forward(AttentionCall(problem.query), metadata)
    with pytest.raises(InvalidInputError, match=r"^metadata must be of FLASH_ATTN, got AttentionMetadata; build it"):
        impl.forward(call, AttentionMetadata(problem.common))
