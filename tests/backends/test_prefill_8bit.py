"""TRITON's prefill kernel for Hopper over 8-bit caches against the oracle, on one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from backends.test_hopper import FEW_BLOCKS, HERE, LENS
from backends.triton_kinds import KINDS, case_of_kind

from pagedattn.backends.registry import get_backend
from pagedattn.kernels.prefill_sm90.plan import INT8_HEAD_DIMS, WHOLE_HEAD_DIMS
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda", 0)


def is_whole(case: Case, head_dims: tuple[int, ...]) -> bool:
    """Whether heads are read in one part."""
    return case.head_dim in head_dims and case.head_dim_v in (None, case.head_dim)


CASES = {
    f"{name}, {kind}": case_of_kind(kind).but(kv_cache_dtype=name, kv_scale=scale)
    for index, kind in enumerate(KINDS)
    for name, scale in (("fp8_e4m3", ("head", "float", "tensor")[index % 3]), ("fp8_e5m2", "tensor"))
    if case_of_kind(kind).dtype == torch.bfloat16 and (name == "fp8_e4m3" or index % 3 == 0)
    if is_whole(case_of_kind(kind), WHOLE_HEAD_DIMS)
}
CASES |= {
    f"int8, {kind}": case_of_kind(kind).but(kv_cache_dtype="int8")
    for kind in KINDS
    if is_whole(case_of_kind(kind), INT8_HEAD_DIMS)
}
CASES["int8, large rows"] = case_of_kind("plain").but(kv_cache_dtype="int8", magnitude=300.0, scale=1e-5)
CASES["e4m3, large rows"] = case_of_kind("plain").but(kv_cache_dtype="fp8_e4m3", magnitude=300.0, scale=1e-5)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that it served; none is over a copy, as `test_dequantised_prompts.py` has them."""
    monkeypatch.setattr("pagedattn.kernels.dequantise.plan.copy_turns", lambda shape, bounds: 0)
    made: list[Any] = []
    for name in ("fp8_kernel", "int8_kernel"):
        family = import_module(f"pagedattn.kernels.prefill_sm90.{name}")

        def seen(
            inputs: Any, entries: torch.Tensor, workspace: torch.Tensor | None, launch: Any = family.launch
        ) -> None:
            launch(inputs, entries, workspace)
            assert not entries[0, :2].any(), "a counter was not left as it was found"
            made.append(inputs)

        monkeypatch.setattr(family, "launch", seen)
    return made


def agrees(case: Case, about: str, launches: list[Any]) -> None:
    launches.clear()
    check(get_backend("TRITON"), make_problem(case, DEVICE), f"{about}, {case.id}")
    assert launches or max(case.query_lens) <= 16, f"{about}: another kernel served"


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, launches: list[Any]) -> None:
    for queries, keys in LENS:
        agrees(CASES[name].but(query_lens=queries, seq_lens=keys), name, launches)
    case = CASES[name].but(query_lens=LENS[2][0], seq_lens=LENS[2][1], fused_qkv=True, padding_rows=5)
    agrees(case.but(share_blocks=not case.poison_behind), f"{name}, fused and padded", launches)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_few_query_blocks(name: str, launches: list[Any]) -> None:
    for queries, keys in FEW_BLOCKS:
        case = CASES[name].but(query_lens=queries, seq_lens=keys)
        if case.sliding_window:  # of so many keys that parts pay
            case = case.but(sliding_window=2030 + case.sliding_window)
        agrees(case, name, launches)
