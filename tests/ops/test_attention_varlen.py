"""TORCH through torch's own varlen kernel: a stand-in with its signature computes by definition on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn import Mask
from pagedattn.backends.registry import get_backend
from pagedattn.kernels.reference import varlen
from pagedattn.testing import attention_oracle
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check
from pagedattn.testing.problem import make_problem

CALLS: list[tuple[int, int]] = []
ASKED = list(dict.fromkeys(case.but(dtype=torch.bfloat16, block_size=256) for case in CASES if case.head_dim <= 128))


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """As torch 2.13 documents it; LSE [Hq, T], garbage for rows without keys."""
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert (block_table is None) == (seqused_k is None) and max_q > 1
    assert block_table is None or (key.shape[1] % 256 == 0 and block_table.dtype == torch.int32)
    lens_q, lens_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert max(lens_q) <= max_q and max(lens_k) <= max_k
    left, right = window_size
    causal = right == 0
    assert causal or left == right
    CALLS.append(window_size)
    out, lse = torch.zeros_like(query), torch.full((query.shape[1], len(query)), 7.0)
    for index, (start, rows, length) in enumerate(zip(cu_seq_q.tolist(), lens_q, lens_k, strict=False)):
        if block_table is None:
            first = int(cu_seq_k[index])
            k, v = key[first : first + length], value[first : first + length]
        else:
            blocks = block_table[index, : -(-length // key.shape[1])].long()
            k, v = (x[blocks].flatten(0, 1)[:length].clone() for x in (key, value))
        window = None if left < 0 else left + 1
        options = {"scale": scale, "mask": Mask(causal, window)}
        got, norm = attention_oracle(query[start : start + rows], k, v, **options)
        out[start : start + rows] = got.to(out.dtype)
        lse[:, start : start + rows] = torch.where(norm.t() == -torch.inf, 7.0, norm.t().float())
    return (out, lse) if return_aux is not None and return_aux.lse else out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = SimpleNamespace(varlen_attn=varlen_attn, AuxRequest=lambda lse: SimpleNamespace(lse=lse))
    monkeypatch.setattr(varlen, "library", lambda: fake)
    monkeypatch.setattr(varlen, "_has_kernel", lambda query: True)
    CALLS.clear()
    yield


@pytest.mark.usefixtures("stand_in")
def test_it_is_the_oracle() -> None:
    for case in ASKED:
        check(get_backend("TORCH"), make_problem(case), case.id)
    assert len(CALLS) >= 60
    assert {(-1, 0), (16, 0), (-1, -1), (8, 8)} <= set(CALLS)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "changes",
    [
        {"softcap": 5.0},
        {"sinks": 0.0},
        {"alibi": True},
        {"block_size": 16},
        {"dtype": torch.float32},
        {"head_dim": 12},
        {"head_dim_v": 16},
        {"scale": -0.3},
        {"kv_cache_dtype": "fp8_e4m3"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_it_cannot_is_left_to_plain_torch(changes: dict[str, Any]) -> None:
    case = Case(block_size=256, dtype=torch.bfloat16).but(**changes)
    check(get_backend("TORCH"), make_problem(case), case.id)
    assert not CALLS


def test_it_is_used_on_a_gpu_only_and_its_signature_is_torchs() -> None:
    query = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    assert not varlen._has_kernel(query)
    real = varlen.library()
    if real is None:
        pytest.skip("this torch has no varlen attention over block tables")
    assert list(inspect.signature(real.varlen_attn).parameters) == list(inspect.signature(varlen_attn).parameters)
    assert real.AuxRequest(lse=True).lse
