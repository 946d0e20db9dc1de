"""FLASHINFER against the sources of both ends of the releases that it serves: signatures, and every call it makes."""

from __future__ import annotations

import inspect
from typing import Any

import fake_flashinfer
import pytest
import torch
from backends.peer_signatures import defaults_of, held_to, signature_of, source_of, stand_ins
from flashinfer_on_cpu import CPU, DECODES, ENDS, HALF, MIXED, OnCpu, attend, builder_of, install, written

from pagedattn.backends.flashinfer.backend import RELEASES
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
RAGGED, PERSISTENT = "BatchPrefillWithRaggedKVCacheWrapper", "BatchAttention"
FILES = {
    DECODE: "flashinfer/decode.py",
    PREFILL: "flashinfer/prefill.py",
    RAGGED: "flashinfer/prefill.py",
    PERSISTENT: "flashinfer/attention/_core.py",
}
LATENT = "BatchMLAPagedAttentionWrapper"
LATENT_FILES = dict(zip(ENDS, ("flashinfer/mla/_core.py", "flashinfer/mla/_batch_mla/_wrapper.py"), strict=True))
METHODS = [(name, method) for name in FILES for method in ("__init__", "plan", "run")]
# What the newest release has more, which nothing here passes: its defaults are what 0.6.13 does.
ADDED = {
    (DECODE, "plan"): {"window_right": "0", "is_causal": "None"},
    (PREFILL, "__init__"): {"variant_owns_mask": "False"},
    (PREFILL, "plan"): {"uniform_q_len": "None"},
    (PREFILL, "run"): {
        **{"lse_base": "'log2'", "lse_layout": "'NH'"},
        **{"use_fp16_softmax": "None", "uses_spcompress": "None"},
    },
    (RAGGED, "__init__"): {"variant_owns_mask": "False"},
    (RAGGED, "plan"): {"uniform_q_len": "None"},
    (RAGGED, "run"): {"lse_base": "'log2'", "lse_layout": "'NH'"},
}


def real(release: str, name: str, method: str) -> inspect.Signature:
    """The method's signature in this release; a `plan` of decodes with `**kwargs` hands them to another method."""
    path = source_of(RELEASES.distribution, release, FILES[name])
    found = signature_of(path, f"{name}.{method}")
    hands_on = any(one.kind is one.VAR_KEYWORD for one in found.parameters.values())
    return signature_of(path, f"{name}._{method}_impl") if hands_on else found


@pytest.mark.parametrize("release", ENDS)
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_the_stand_in_has_the_librarys_signatures(release: str, name: str, method: str) -> None:
    ours = stand_ins(getattr(getattr(fake_flashinfer, name), method))
    theirs = defaults_of(real(release, name, method))
    added = {} if release == RELEASES.oldest else ADDED.get((name, method), {})
    assert {parameter: theirs.pop(parameter, "not there") for parameter in added} == added
    assert [*ours.items()] == [*theirs.items()]


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("release", ENDS)
def test_the_wrapper_of_latent_rows_has_the_librarys_signatures(release: str, method: str) -> None:
    """The newest release has other ways to say the same, and so defaults for all of it; what is passed by position and
    by name here stands where it stood."""
    ours = stand_ins(getattr(getattr(fake_flashinfer, LATENT), method))
    theirs = defaults_of(
        signature_of(source_of(RELEASES.distribution, release, LATENT_FILES[release]), f"{LATENT}.{method}")
    )
    if release == RELEASES.oldest:
        assert [*ours.items()] == [*theirs.items()]
    else:
        assert [*theirs][: len(ours)] == [*ours]
        assert all(default is not None for name, default in theirs.items() if name not in ours)


@pytest.mark.parametrize("release", ENDS)
def test_every_call_over_latent_rows_fits_the_librarys_signatures(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, release)
    passed: dict[str, set[str]] = {}
    for method in ("__init__", "plan", "run"):
        path = source_of(RELEASES.distribution, release, LATENT_FILES[release])
        seen, whole = passed.setdefault(method, set()), getattr(getattr(fake, LATENT), method)
        held = held_to(signature_of(path, f"{LATENT}.{method}"), whole, seen.update)
        monkeypatch.setattr(getattr(fake, LATENT), method, held)
    row: dict[str, Any] = {"latent_dim": 512, "head_dim": 576, "scale": 0.05, "heads": (2, 1), "dtype": torch.float16}
    check(OnCpu, make_problem(Case(**row)), "latent rows")
    assert {"kv_len_arr", "sm_scale", "causal"} <= passed["plan"] and {"lse", "return_lse", "out"} <= passed["run"]


@pytest.mark.parametrize("release", ENDS)
def test_every_call_of_the_adapter_fits_the_librarys_signatures(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, release)
    passed: dict[tuple[str, str], set[str]] = {}
    for name in (DECODE, PREFILL, RAGGED):
        for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
            seen = passed.setdefault((name, method), set())
            whole = getattr(getattr(fake, name), method)
            monkeypatch.setattr(getattr(fake, name), method, held_to(real(release, name, method), whole, seen.update))
    call_everything(fake)
    assert not [key for key, names in passed.items() if not names], "not called"
    assert {"out", "lse", "return_lse", "k_scale", "v_scale"} <= passed[DECODE, "run"] & passed[PREFILL, "run"]
    assert {"use_cuda_graph", "paged_kv_indices_buffer"} <= passed[DECODE, "__init__"]
    assert "backend" in passed[RAGGED, "__init__"]


def call_everything(fake: Any) -> None:
    """Decodes, prompts, packed keys, fp8 with scales, a captured step, and a workspace that is replaced in each."""
    mixed, dense = written(MIXED), make_problem(Case(**HALF, paged=False))
    builders = [(problem, builder_of(problem)) for problem in (mixed, dense)]
    for fake.needs_bytes in (0, 5 << 20):
        for problem, builder in builders:
            attend(problem, builder.build(problem.common.replace(num_decodes=problem is mixed and 2)))
    decodes = written(DECODES)
    builder = builder_of(decodes)
    builder.build(decodes.common, into=builder.build(decodes.common, capture=True))
    lens: dict[str, Any] = {"query_lens": (1, 1, 9), "seq_lens": (20, 37, 24)}
    case = Case(head_dim=128, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", kv_scale="float", **lens)
    problem = make_problem(case)
    check(OnCpu, problem, "fp8")
    assert OnCpu.builder(problem.spec, CPU)
