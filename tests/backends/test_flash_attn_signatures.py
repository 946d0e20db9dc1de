"""FLASH_ATTN against the sources of FlashAttention 2 and 3: signatures, and every call that the adapter makes."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from backends.fake_flash_attn import MODULES, fa3_of_2_8_0, fa3_of_2_8_3
from backends.peer_signatures import defaults_of, held_to, signature_of, source_of, stand_ins

from pagedattn.backends.flash_attn import FlashAttnBackend
from pagedattn.backends.flash_attn import versions as versions
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

RELEASES = versions.FA2.releases
VARLEN, PAGED, SCHEDULE = "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"
NAMES = {2: (VARLEN, PAGED), 3: (VARLEN, PAGED, SCHEDULE)}
# FlashAttention 3 has no releases on the index: its Python comes with the sources of FlashAttention 2.
SOURCES = {2: "flash_attn/flash_attn_interface.py", 3: "hopper/flash_attn_interface.py"}
ENDS = [(number, end) for number in SOURCES for end in dict.fromkeys((RELEASES.oldest, RELEASES.newest))]
FUNCTIONS = [(number, release, name) for number, release in ENDS for name in NAMES[number]]
MODULE = {2: "flash_attn", 3: "flash_attn_interface"}


def real(number: int, release: str, name: str) -> inspect.Signature:
    return signature_of(source_of(RELEASES.distribution, release, SOURCES[number]), name)


@pytest.mark.parametrize(("number", "release", "name"), FUNCTIONS)
def test_the_stand_in_has_the_librarys_signatures(number: int, release: str, name: str) -> None:
    ours = stand_ins(vars(MODULES[number][MODULE[number]])[name])
    theirs = defaults_of(real(number, release, name))
    if (number, name) == (3, VARLEN):  # later builds take it; those that do not are stand-ins of their own
        assert "return_attn_probs" not in theirs and ours.pop("return_attn_probs") == "False"
        assert [*ours] == [*stand_ins(fa3_of_2_8_0)] == [*stand_ins(fa3_of_2_8_3)]
    assert [*ours.items()] == [*theirs.items()]


def test_older_builds_of_flash_attention_3_return_lse_always_or_never() -> None:
    """What the stand-ins of those builds do, as the sources have it."""
    for release, returned in ((RELEASES.oldest, "return out, softmax_lse\n"), (RELEASES.newest, "return out\n")):
        text = source_of(RELEASES.distribution, release, SOURCES[3]).read_text(encoding="utf-8")
        forward = text.partition("class FlashAttnVarlenFunc")[2].partition("def backward")[0]
        assert forward.count("return ") == 1 and returned in forward


@pytest.mark.parametrize(("number", "release"), ENDS)
def test_every_call_of_the_adapter_fits_the_librarys_signatures(
    number: int, release: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(versions.library.cache_clear)  # where it is skipped too, and before what is patched returns
    calls: dict[str, set[str]] = {name: set() for name in NAMES[number]}
    for name, module in MODULES[number].items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "_installed", lambda name: name in MODULES[number])
    monkeypatch.setattr(versions, "release_of", {RELEASES.distribution: release}.get)
    monkeypatch.setattr(versions.Capabilities, "rejections", lambda self, spec: [])
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", str(number))
    versions.library.cache_clear()
    library = versions.library(next(one for one in versions.VERSIONS if one.number == number))
    for name, seen in calls.items():
        whole = vars(library)[name] if (number, name) != (3, VARLEN) else fa3_of_2_8_0
        monkeypatch.setattr(library, name, held_to(real(number, release, name), whole, seen.update))
    size: dict[str, Any] = {
        "block_size": 256 if number == 2 else 16,
        "head_dim": 64,
        "clean_cache": True,
        "dtype": torch.bfloat16,
        "heads": (2, 2),
    }
    lens: dict[str, Any] = {"query_lens": (1, 1), "seq_lens": (20, 37)}
    for case in (Case(**size), Case(**size, **lens), Case(**size, paged=False), Case(**size, sliding_window=9)):
        check(FlashAttnBackend, make_problem(case), case.id)
    assert all(calls.values()), calls
    common = {"softmax_scale", "causal", "softcap", "window_size"}
    assert all(common <= names for name, names in calls.items() if name != SCHEDULE)
