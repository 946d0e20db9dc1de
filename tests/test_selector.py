"""Who serves a spec: argument > use_backend() > PAGEDATTN_BACKEND > priority, and every reason why not another."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import pagedattn
from pagedattn import AttentionSpec, register_backend, select_backend, use_backend
from pagedattn.backends import registry, selector
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.backends.triton import TritonBackend
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.kernels import hopper
from pagedattn.runtime import triton_versions
from pagedattn.spec import Capabilities, ContextParallel, IntRange, Rejection
from pagedattn.testing import interpreted

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32)
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="TRITON serves the CPU only when interpreted")


class SmallBlocks(TorchBackend):
    name = "SMALL"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), block_sizes=IntRange(high=32))


class LargeBlocks(TorchBackend):
    name = "LARGE"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), block_sizes=IntRange(256, None, 256), default_block_size=256)


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDATTN_BACKEND", raising=False)
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(selector, "_logged", set())
    register_backend("SMALL", f"{__name__}:SmallBlocks")
    register_backend("LARGE", f"{__name__}:LargeBlocks")


def test_priority_decides_where_nobody_asks() -> None:
    chosen = select_backend(SPEC)
    assert (chosen.name, chosen.prefill, chosen.decode) == ("TORCH", TorchBackend, TorchBackend)
    assert (chosen.source, chosen.block_size, chosen.spec) == ("measured priority", 16, SPEC)
    assert selector.PRIORITY["cuda"]["prefill"] == ("FLASH_ATTN", "TRITON", "TORCH")
    assert selector.PRIORITY["cuda"]["decode"] == ("TRITON", "FLASH_ATTN", "TORCH")


def test_who_leads_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selector.PRIORITY, "cpu", {"prefill": ("TORCH", "SMALL"), "decode": ("TORCH", "SMALL")})
    monkeypatch.setattr(SmallBlocks, "is_fastest_for", classmethod(lambda cls, phase, spec: phase == "prefill"))
    assert select_backend(SPEC).name == "prefill=SMALL,decode=TORCH"


def test_triton_leads_where_its_kernel_for_hopper_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPEC.replace(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, head_dim=128)
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    monkeypatch.setattr(hopper, "why_not_on", hopper.why_not_on.__wrapped__)
    assert selector._order("prefill", spec) == ["TRITON", "FLASH_ATTN", "TORCH"]
    assert selector._order("prefill", spec.replace(head_dim=80))[0] == "TRITON"
    assert selector._order("prefill", spec.replace(capability=(8, 0)))[0] == "FLASH_ATTN"
    fp8 = spec.replace(kv_cache_dtype="fp8_e4m3")
    assert selector._order("prefill", fp8)[0] == "TRITON" and TritonBackend.is_fastest_for("prefill", fp8)
    assert TritonBackend.is_fastest_for("prefill", fp8.replace(dtype=torch.float16))
    int8 = spec.replace(kv_cache_dtype="int8")
    assert selector._order("prefill", int8)[0] == "TRITON"
    assert selector._order("prefill", int8.replace(head_dim=256))[0] == "TRITON"
    assert selector._order("prefill", int8.replace(head_dim=80))[0] == "FLASH_ATTN"
    assert selector._order("prefill", spec.replace(kv_cache_dtype="k8v4"))[0] == "TRITON"
    stored = ({"kv_cache_dtype": "k8v4", "head_dim": 256}, {"kv_cache_dtype": "turboquant4"})
    for other in ({"has_alibi": True}, {"head_dim": 96}, {"head_dim": 100}, *stored):
        assert selector._order("prefill", spec.replace(**other))[0] == "FLASH_ATTN", other


@pytest.mark.parametrize("found", ["3.5.1", "3.10.0", "4.0"])
def test_a_triton_that_was_not_tried_says_so_once(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_versions, "installed", lambda: found)
    uncached = vars(TritonBackend)["availability"].__func__.__wrapped__
    monkeypatch.setattr(TritonBackend, "availability", classmethod(uncached))
    monkeypatch.setattr(hopper, "why_not_on", hopper.why_not_on.__wrapped__)
    selector._warn_once.cache_clear()
    spec = SPEC.replace(device_type="cuda", capability=(9, 0), dtype=torch.float16, head_dim=128)
    assert not TritonBackend.is_fastest_for("prefill", spec) and found in hopper.why_not_on((9, 0))
    for _ in range(2):
        assert select_backend(spec, "TRITON").name == "TRITON"
    said = [record.getMessage() for record in caplog.records if "was not tried" in record.getMessage()]
    assert len(said) == 1 and f"triton {found}" in said[0] and "install" in said[0]


def test_versions_of_triton_that_were_tried_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("3.6.0", "3.7.1+git1234", "3.8.0", "3.9.2"):
        monkeypatch.setattr(triton_versions, "installed", lambda found=found: found)
        assert triton_versions.why_untried() == ""
    monkeypatch.setattr(triton_versions, "installed", lambda: None)
    assert triton_versions.why_untried() == "triton is not installed"


def test_each_phase_has_its_own_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selector.PRIORITY, "cpu", {"prefill": ("SMALL", "TORCH"), "decode": ("TORCH",)})
    assert select_backend(SPEC).name == "prefill=SMALL,decode=TORCH"
    assert select_backend(SPEC.replace(block_size=64)).name == "TORCH"


def test_who_cannot_take_a_usual_cache_is_not_chosen_unasked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(selector.PRIORITY, "cpu", {"prefill": ("LARGE", "TORCH"), "decode": ("LARGE", "TORCH")})
    selector._warn_once.cache_clear()
    assert (select_backend(SPEC).name, select_backend(SPEC).block_size) == ("TORCH", 16)
    assert select_backend(SPEC, "LARGE").block_size == 256
    assert select_backend(SPEC.replace(kv_cache_dtype="turboquant4")).block_size == 32, "read fastest so"
    assert select_backend(SPEC.replace(kv_cache_dtype="int8")).block_size == 16
    assert select_backend(SPEC.replace(block_size=256)).name == "LARGE"
    assert not caplog.records
    assert select_backend(SPEC.replace(block_size=32)).name == "TORCH"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "block size 32 excludes LARGE, which is faster"
    ]


def test_argument_before_context_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "SMALL")
    assert (select_backend(SPEC).name, select_backend(SPEC).source) == ("SMALL", "PAGEDATTN_BACKEND")
    with use_backend("LARGE"):
        assert (select_backend(SPEC).name, select_backend(SPEC).source) == ("LARGE", "use_backend")
        chosen = select_backend(SPEC, "TORCH")
        assert (chosen.name, chosen.source) == ("TORCH", "argument")
        with use_backend("TORCH"):
            assert select_backend(SPEC).name == "TORCH"
        assert select_backend(SPEC).name == "LARGE"
    assert select_backend(SPEC).name == "SMALL"


def test_use_backend_ends_with_its_block_also_by_an_error() -> None:
    with pytest.raises(RuntimeError), use_backend("LARGE"):
        raise RuntimeError
    assert select_backend(SPEC).name == "TORCH"


def test_an_empty_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "")
    assert select_backend(SPEC).source == "measured priority"


def test_a_layer_keeps_what_was_asked_when_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_backend("SMALL"):
        layer = pagedattn.Attention(4, 32)
    monkeypatch.setenv("PAGEDATTN_BACKEND", "LARGE")
    assert layer.double().selection.name == "SMALL"
    assert pagedattn.Attention(4, 32).selection.name == "LARGE"


@pytest.mark.parametrize(("name", "near"), [("TRITTON", "TRITON"), ("torch", "TORCH"), ("Tritn", "TRITON")])
def test_an_unknown_name_suggests_the_nearest(name: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=rf"did you mean {near}\?"):
        select_backend(SPEC, name)
    with pytest.raises(InvalidInputError, match=rf"did you mean {near}\?"), use_backend(name):
        pass
    monkeypatch.setenv("PAGEDATTN_BACKEND", name)
    with pytest.raises(InvalidInputError, match=rf"did you mean {near}\?"):
        select_backend(SPEC)


def test_a_name_near_to_none_lists_them_all() -> None:
    names = "FLASH_ATTN, FLASHINFER, FLASH_MLA, TRITON, TORCH, SMALL, LARGE"
    with pytest.raises(InvalidInputError, match=f"one of {names}") as error:
        select_backend(SPEC, "QQQQQQ")
    assert "did you mean" not in str(error.value)
    with pytest.raises(InvalidInputError) as error:
        select_backend(SPEC, "MINE")  # a few letters of FLASHINFER are not enough
    assert "did you mean" not in str(error.value)


def test_an_explicit_request_that_cannot_run_raises_with_value_and_hint() -> None:
    with pytest.raises(UnsupportedError, match="backend LARGE, asked for by argument, cannot serve this") as error:
        select_backend(SPEC.replace(block_size=16), "LARGE")
    reason = "block_size=16 (serves multiples of 256 in 256 and more): build the cache with block_size=256"
    assert reason in str(error.value)
    with pytest.raises(UnsupportedError, match=r"head_dim=600 \(serves 1\.\.512\)"):
        select_backend(SPEC.replace(head_dim=600, head_dim_v=600), "TRITON")


@needs_interpreter
def test_the_interpreter_is_not_given_bfloat16() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype=bfloat16 .*TRITON_INTERPRET=1\): .*unset TRITON_INTERPRET"):
        select_backend(SPEC.replace(dtype=torch.bfloat16), "TRITON")


def test_where_nobody_can_everybody_says_why() -> None:
    with pytest.raises(UnsupportedError, match="no backend can serve") as error:
        select_backend(SPEC.replace(dtype=torch.int32))
    text = str(error.value)
    assert all(f"{name}: " in text for name in ("TRITON", "TORCH", "SMALL", "LARGE"))
    assert text.count("dtype=int32 (serves ") >= 4


def test_every_loser_is_listed_with_its_reasons() -> None:
    chosen = select_backend(SPEC.replace(block_size=64))
    assert sorted(chosen.rejections) == ["FLASHINFER", "FLASH_ATTN", "FLASH_MLA", "LARGE", "SMALL", "TRITON"]
    assert str(chosen.rejections["SMALL"][0]).startswith("block_size=64 (serves 1..32)")
    assert "not LARGE: block_size=64" in chosen.describe()
    assert "TORCH (chosen by measured priority, block size 64)" in chosen.describe()
    assert "not SMALL: lower priority" in select_backend(SPEC).describe()


@pytest.mark.parametrize("name", ["TRITON", "TORCH"])
def test_every_refusal_has_values(name: str) -> None:
    odd = SPEC.replace(
        device_type="tpu",
        dtype=torch.int32,
        head_dim=601,
        head_dim_v=600,
        block_size=4096,
        has_sinks=True,
        deterministic=True,
        context_parallel=ContextParallel(world=2, rank=0),
    )
    found = registry.get_backend(name).rejections(odd)
    features = {one.feature for one in found}
    assert {"device_type", "dtype", "context_parallel"} <= features
    assert all(one.feature and str(one.requested) and str(one.supported) for one in found)


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("prefill=SMALL,decode=TORCH", "SMALL", "TORCH"),
        (" decode = SMALL , prefill = TORCH ", "TORCH", "SMALL"),
        ("prefill=SMALL", "SMALL", "TORCH"),
        ("decode=SMALL", "TORCH", "SMALL"),
    ],
)
def test_each_phase_may_have_its_own(text: str, prefill: str, decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_argument = select_backend(SPEC, text)
    monkeypatch.setenv("PAGEDATTN_BACKEND", text)
    for chosen in (by_argument, select_backend(SPEC)):
        assert (chosen.prefill.name, chosen.decode.name) == (prefill, decode)
        assert chosen.name == f"prefill={prefill},decode={decode}"
        assert prefill not in chosen.rejections and decode not in chosen.rejections


@pytest.mark.parametrize("text", ["verify=TORCH", "prefill=TORCH,prefill=SMALL", "prefill=", "=TORCH", "prefill=NOPE"])
def test_a_phase_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        select_backend(SPEC, text)


def test_a_composite_needs_a_block_size_that_both_take() -> None:
    assert select_backend(SPEC, "prefill=LARGE,decode=TORCH").block_size == 256
    assert select_backend(SPEC, "prefill=TORCH,decode=LARGE").block_size == 256
    with pytest.raises(UnsupportedError, match=r"need one block size .* but SMALL refuses .*serves 1\.\.32"):
        select_backend(SPEC, "prefill=SMALL,decode=LARGE")
    with pytest.raises(UnsupportedError, match=r"need one block size .* but SMALL refuses .*serves 1\.\.32"):
        select_backend(SPEC, "prefill=LARGE,decode=SMALL")
    with pytest.raises(UnsupportedError, match=r"backend SMALL, .*\n.*block_size=256"):
        select_backend(SPEC.replace(block_size=256), "prefill=LARGE,decode=SMALL")


def test_variants_are_told_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallBlocks, "variant", classmethod(lambda cls, spec: f"v3 of {spec.head_dim}"))
    chosen = select_backend(SPEC, "prefill=SMALL,decode=TORCH")
    assert (chosen.name, chosen.served_by) == ("prefill=SMALL,decode=TORCH", "prefill=SMALL (v3 of 32),decode=TORCH")
    assert chosen.describe().startswith("prefill=SMALL (v3 of 32),decode=TORCH (chosen by argument, block size 16)\n")
    assert select_backend(SPEC, "prefill=TORCH,decode=SMALL").served_by == "prefill=TORCH,decode=SMALL (v3 of 32)"
    assert select_backend(SPEC, "SMALL").served_by == "SMALL (v3 of 32)"


def test_the_winner_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagedattn"):
        for _ in range(3):
            select_backend(SPEC)
    assert [record.message for record in caplog.records if "TORCH (chosen by" in record.message] == [
        f"attention backend: {select_backend(SPEC).describe()}"
    ]


def test_registering_takes_a_free_name_and_a_class() -> None:
    register_backend("SMALL", f"{__name__}:SmallBlocks")  # the same again is harmless
    with pytest.raises(InvalidInputError, match="name must be a name not yet taken, got TORCH"):
        register_backend("TORCH", f"{__name__}:SmallBlocks")
    for target in ("module", "module:", ":Class", ""):
        with pytest.raises(InvalidInputError, match='target must be "module:Class"'):
            register_backend("OTHER", target)
    assert "OTHER" not in registry.backend_names()


def test_an_error_without_a_text_is_told_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejections(spec: AttentionSpec) -> list[Rejection]:
        raise MemoryError

    monkeypatch.setattr(registry.get_backend("TORCH"), "rejections", rejections)
    with pytest.raises(UnsupportedError, match=r"not available: MemoryError$"):
        select_backend(SPEC, "TORCH")
