"""FLASH_MLA against FlashMLA's signatures, of its first release and of now: it has no release on the index to read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import fake_flash_mla
from backends.latent_peers import DEVICE, GPU, ROW, forget, install
from backends.peer_signatures import held_to

from pagedattn.backends.flash_mla import FlashMLABackend, metadata
from pagedattn.bench import flash_mla_library
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = pytest.mark.skipif(GPU, reason="the stand-ins compute on a CPU")
CALL, METADATA = "flash_mla_with_kvcache", "get_mla_metadata"
_NEEDED = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")
_CACHED = ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
# Each parameter and its default, `...` where it has none: flash_mla/flash_mla_interface.py of the first release and of
# commit 02fe0d0. The first makes the schedule in `get_mla_metadata`, the second in the first call.
FIRST = {
    METADATA: dict.fromkeys(("cache_seqlens", "num_heads_per_head_k", "num_heads_k"), ...),
    CALL: {**dict.fromkeys((*_NEEDED, "num_splits"), ...), "softmax_scale": None, "causal": False},
}
NOW = {
    METADATA: None,  # *args, **kwargs
    CALL: {
        **dict.fromkeys(_NEEDED, ...),
        **{"num_splits": None, "softmax_scale": None, "causal": False, "is_fp8_kvcache": False},
        **dict.fromkeys(_CACHED),
    },
}
RELEASES = {"first": FIRST, "now": NOW}


def signature(parameters: dict[str, Any] | None) -> inspect.Signature:
    kind = inspect.Parameter
    if parameters is None:
        return inspect.Signature([kind("args", kind.VAR_POSITIONAL), kind("kwargs", kind.VAR_KEYWORD)])
    named = [(name, kind.empty if default is ... else default) for name, default in parameters.items()]
    return inspect.Signature([kind(name, kind.POSITIONAL_OR_KEYWORD, default=default) for name, default in named])


def test_the_stand_in_has_the_librarys_signatures() -> None:
    for name, parameters in NOW.items():
        ours = inspect.signature(getattr(fake_flash_mla, name))
        assert [(one.name, one.kind, one.default) for one in ours.parameters.values()] == [
            (one.name, one.kind, one.default) for one in signature(parameters).parameters.values()
        ]


def test_the_module_over_the_operators_takes_what_is_passed() -> None:
    ours = inspect.signature(flash_mla_library.flash_mla_with_kvcache).parameters
    assert [*ours] == [*FIRST[CALL]] and not {*inspect.signature(flash_mla_library.get_mla_metadata).parameters} - {
        "args",
        "kwargs",
    }


@pytest.mark.parametrize("release", RELEASES)
def test_every_call_of_the_adapter_fits_the_librarys_signatures(
    release: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    install(monkeypatch)
    request.addfinalizer(forget)
    library = metadata.library()
    passed: dict[str, set[str]] = {}
    functions: dict[str, Callable[..., Any]] = {name: vars(library)[name] for name in RELEASES[release]}
    for name, whole in functions.items():
        seen = passed.setdefault(name, set())
        monkeypatch.setattr(library, name, held_to(signature(RELEASES[release][name]), whole, seen.update))
    row: dict[str, Any] = {**ROW, "heads": (2, 1), "block_size": 64}
    lens: dict[str, Any] = {"query_lens": (2, 2), "seq_lens": (20, 70)}
    for case in (Case(**row), Case(**row, **lens), Case(**row, causal=False)):
        check(FlashMLABackend, make_problem(case, DEVICE), case.id)
    assert {"softmax_scale", "causal", "num_splits"} <= passed[CALL] and passed[METADATA]


def test_the_first_release_makes_the_schedule_from_rows_per_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metadata.library(), METADATA, lambda *args: (seen.append(args), "splits"))
    problem = make_problem(Case(**ROW, heads=(5, 1), block_size=64, query_lens=(3, 3), seq_lens=(20, 70)), DEVICE)
    built = FlashMLABackend.builder(problem.spec, DEVICE).build(problem.common)
    assert isinstance(built, metadata.FlashMLAMetadata) and built.schedule(5) == (None, "splits")
    lengths, rows, kv_heads = seen[0]
    assert torch.equal(lengths, problem.common.seq_lens) and (rows, kv_heads) == (15, 1)
    forget()
