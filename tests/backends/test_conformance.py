"""Every backend runs the same cases against the float64 oracle; what each must serve is a literal table."""

from __future__ import annotations

import pytest
import torch
from case_facets import facets, facets_by_dtype

from pagedattn.backends.registry import get_backend
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES, MLA_CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
DTYPES = {
    "TORCH": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "TRITON": (torch.float32, torch.bfloat16, torch.float16) if GPU else (torch.float32,),
}
UNALIGNED_FP8 = 2 if GPU else 0
MUST_SERVE = {"TORCH": len(CASES), "TRITON": len(CASES) - UNALIGNED_FP8}
MUST_SERVE_MLA = {"TORCH": len(MLA_CASES), "TRITON": len(MLA_CASES)}


def _variants(name: str) -> list[Case]:
    return [
        Case(**{**{slot: getattr(case, slot) for slot in Case.__slots__}, "dtype": dtype})
        for case in (*CASES, *MLA_CASES)
        for dtype in DTYPES[name]
    ]


@pytest.mark.cover(by=facets_by_dtype)
@pytest.mark.parametrize("case", _variants("TORCH"), ids=lambda case: f"{case.id}-{case.dtype}")
def test_torch(case: Case) -> None:
    check(get_backend("TORCH"), make_problem(case, DEVICE), case.id)


@pytest.mark.cover(by=facets)
@pytest.mark.parametrize("case", _variants("TRITON"), ids=lambda case: f"{case.id}-{case.dtype}")
def test_triton(case: Case) -> None:
    reasons = get_backend("TRITON").rejections(case.spec(DEVICE))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    check(get_backend("TRITON"), make_problem(case, DEVICE), case.id)


@pytest.mark.parametrize("name", sorted(MUST_SERVE))
def test_serves_all_it_must(name: str) -> None:
    served = [case for case in CASES if not get_backend(name).rejections(case.spec(DEVICE))]
    assert len(served) == MUST_SERVE[name] >= 130
    served = [case for case in MLA_CASES if not get_backend(name).rejections(case.spec(DEVICE))]
    assert len(served) == MUST_SERVE_MLA[name] >= 30
