"""FLASH_ATTN against the sources of FlashAttention 2, 3 and 4: signatures, and every call that the adapter makes."""

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

TWO, FOUR = versions.FA2.releases, versions.FA4.releases
VARLEN, PAGED, SCHEDULE = "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"
NAMES = {2: (VARLEN, PAGED), 3: (VARLEN, PAGED, SCHEDULE), 4: (VARLEN,)}
# FlashAttention 3 has no releases on the index: its Python comes with the sources of FlashAttention 2.
SOURCES = {
    2: (TWO, "flash_attn/flash_attn_interface.py"),
    3: (TWO, "hopper/flash_attn_interface.py"),
    4: (FOUR, "flash_attn/cute/interface.py"),
}
ENDS = [(n, end) for n, (releases, _) in SOURCES.items() for end in dict.fromkeys((releases.oldest, releases.newest))]
FUNCTIONS = [(number, release, name) for number, release in ENDS for name in NAMES[number]]
MODULE = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}


def real(number: int, release: str, name: str) -> inspect.Signature:
    releases, file = SOURCES[number]
    return signature_of(source_of(releases.distribution, release, file), name)


@pytest.mark.parametrize(("number", "release", "name"), FUNCTIONS)
def test_the_stand_in_has_the_librarys_signatures(number: int, release: str, name: str) -> None:
    ours = stand_ins(vars(MODULES[number][MODULE[number]])[name])
    theirs = defaults_of(real(number, release, name))
    if (number, name) == (3, VARLEN):  # later builds take it; those that do not are stand-ins of their own
        assert "return_attn_probs" not in theirs and ours.pop("return_attn_probs") == "False"
        assert [*ours] == [*stand_ins(fa3_of_2_8_0)] == [*stand_ins(fa3_of_2_8_3)]
    if number == 4:  # what else it has is for other uses, and off by default
        for other in theirs.keys() - ours.keys():
            assert theirs.pop(other) in ("None", "False"), other
    assert [*ours.items()] == [*theirs.items()]


def test_older_builds_of_flash_attention_3_return_lse_always_or_never() -> None:
    """What the stand-ins of those builds do, as the sources have it."""
    for release, returned in ((TWO.oldest, "return out, softmax_lse\n"), (TWO.newest, "return out\n")):
        text = source_of(TWO.distribution, release, SOURCES[3][1]).read_text(encoding="utf-8")
        forward = text.partition("class FlashAttnVarlenFunc")[2].partition("def backward")[0]
        assert forward.count("return ") == 1 and returned in forward


@pytest.mark.parametrize(("number", "release"), ENDS)
def test_every_call_of_the_adapter_fits_the_librarys_signatures(
    number: int, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, set[str]] = {name: set() for name in NAMES[number]}
    for name, module in MODULES[number].items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "_installed", lambda name: name in MODULES[number])
    monkeypatch.setattr(versions, "release_of", {SOURCES[number][0].distribution: release}.get)
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
    versions.library.cache_clear()
    assert all(calls.values()), calls
    common = {"softmax_scale", "causal", "softcap", "window_size"}
    assert all(common <= names for name, names in calls.items() if name != SCHEDULE)
