"""paged_attention: the layer without a layer gives what the layer gives, and asks the environment on every call."""

from __future__ import annotations

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, paged_attention, use_backend
from pagedattn.backends.torch_native.backend import TorchImpl
from pagedattn.backends.triton.backend import TritonImpl
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.testing import Case, assert_close, interpreted, make_problem
from pagedattn.testing.compare import assert_lse_close

CASE = Case(query_lens=(1, 9, 5), seq_lens=(37, 24, 5), heads=(4, 2), sinks=0.5, sliding_window=20, softcap=9.0)


def test_it_is_the_layer_and_the_oracle() -> None:
    problem = make_problem(CASE)
    layer = Attention(4, 32, 2, sinks=problem.sinks, sliding_window=20, softcap=9.0)
    want = layer(problem.query, problem.key, problem.value, problem.cache, problem.common)
    fresh = make_problem(CASE)
    out, lse = paged_attention(
        fresh.query, fresh.key, fresh.value, fresh.cache, fresh.common,
        sinks=fresh.sinks, sliding_window=20, softcap=9.0, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, want)
    assert_close("functional", out, problem.expected, problem.naive, softcap=True)
    assert lse is not None and lse.dtype == torch.float32
    assert_lse_close("functional", lse, problem.expected_lse, torch.float32)
    assert fresh.cache is not None and fresh.cache_after is not None
    assert torch.equal(fresh.cache.key.nan_to_num(7.0), fresh.cache_after.key.nan_to_num(7.0))


def test_without_keys_nothing_is_written() -> None:
    problem = make_problem(Case(query_lens=(1, 9), seq_lens=(37, 24), write=False))
    assert problem.cache is not None
    before = problem.cache.key.clone()
    out, lse = paged_attention(problem.query, None, None, problem.cache, problem.common)
    assert lse is None
    assert_close("shared", out, problem.expected, problem.naive)
    assert torch.equal(problem.cache.key.nan_to_num(7.0), before.nan_to_num(7.0))


def test_without_a_cache_it_attends_to_the_given_keys() -> None:
    problem = make_problem(Case(paged=False, query_lens=(5, 3), seq_lens=(5, 8), causal=False, alibi=True))
    out, _ = paged_attention(
        problem.query, problem.key, problem.value, None, problem.common,
        causal=False, alibi_slopes=problem.alibi_slopes,
    )  # fmt: skip
    assert_close("dense", out, problem.expected, problem.naive)
    with pytest.raises(InvalidInputError, match="key and value must be given where there is no kv_cache"):
        paged_attention(problem.query, None, None, None, problem.common)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
def test_who_is_asked_for_may_change_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for impl in (TorchImpl, TritonImpl):
        original = impl.forward

        def forward(self, *args, _original=original, **kwargs):  # type: ignore[no-untyped-def]
            ran.append(self.path)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(impl, "forward", forward)
    rows = torch.randn(3, 2, 16)
    common = CommonAttentionMetadata.from_lengths([3], [3])
    monkeypatch.delenv("PAGEDATTN_BACKEND", raising=False)
    plain, _ = paged_attention(rows, rows, rows, None, common)
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    by_variable, _ = paged_attention(rows, rows, rows, None, common)
    with use_backend("TORCH"):
        paged_attention(rows, rows, rows, None, common)
        paged_attention(rows, rows, rows, None, common, backend="TRITON")
    assert ran == ["torch", "triton", "torch", "triton"]
    assert torch.allclose(plain, by_variable, atol=1e-5)


def test_what_nobody_serves_is_refused() -> None:
    rows = torch.zeros(3, 2, 16, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="dtype=int32"):
        paged_attention(rows, rows, rows, None, CommonAttentionMetadata.from_lengths([3], [3]))


def test_a_flat_query_is_refused_by_name() -> None:
    rows = torch.randn(3, 32)
    with pytest.raises(InvalidInputError, match="query"):
        paged_attention(rows, rows, rows, None, CommonAttentionMetadata.from_lengths([3], [3]))


def test_fewer_rows_than_the_metadata_says_are_refused() -> None:
    rows = torch.randn(3, 2, 16)
    with pytest.raises(InvalidInputError, match="query"):
        paged_attention(rows[:2], rows, rows, None, CommonAttentionMetadata.from_lengths([3], [3]))


@pytest.mark.parametrize("common", [None, 3])
def test_what_is_no_metadata_is_refused_by_name(common: object) -> None:
    rows = torch.randn(3, 2, 16)
    with pytest.raises(InvalidInputError, match="common must be a CommonAttentionMetadata"):
        paged_attention(rows, rows, rows, None, common)  # type: ignore[arg-type]
