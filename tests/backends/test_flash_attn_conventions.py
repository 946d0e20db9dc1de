"""The stand-ins of FlashAttention against what its documentation says, written out here; no oracle of ours is asked."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends.fake_flash_attn import MODULES, fa3_of_2_8_0
from backends.peer_signatures import source_of

from pagedattn.backends.flash_attn import versions as versions

FA2, FA3 = MODULES[2]["flash_attn"], MODULES[3]["flash_attn_interface"]
LENS_Q, LENS_K, PAGE, SCALE = (2, 5, 1, 4), (5, 2, 9, 0), 256, 0.3
Window = tuple[int, int]


def starts(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def problem(heads: int = 4, kv_heads: int = 2, dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((sum(LENS_Q), heads, dim), (sum(LENS_K), kv_heads, dim), (sum(LENS_K), kv_heads, dim))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def paged(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with the sequences of packed `rows` in blocks back to front, NaN past each, and the block table."""
    cache = torch.full((len(LENS_K), PAGE, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    for b, one in enumerate(rows.split(LENS_K)):
        cache[len(LENS_K) - 1 - b, : len(one)] = one
    return cache, torch.arange(len(LENS_K) - 1, -1, -1, dtype=torch.int32)[:, None]


Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # packed q, k, v, options -> out [T, H, D], lse [H, T]


def fa2_packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    lens = (starts(LENS_Q), starts(LENS_K), max(LENS_Q), max(LENS_K))
    return FA2.flash_attn_varlen_func(q, k, v, *lens, **options, return_attn_probs=True)[:2]


def fa2_paged(q: Any, k: Any, v: Any, **options: Any) -> Any:
    (keys, table), (values, _) = paged(k), paged(v)
    lens = (starts(LENS_Q), starts(LENS_K), max(LENS_Q), max(LENS_K))
    got = FA2.flash_attn_varlen_func(q, keys, values, *lens, **options, return_attn_probs=True, block_table=table)
    return got[:2]


def fa3_packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    lens = (starts(LENS_Q), starts(LENS_K), max(LENS_Q), max(LENS_K))
    got = FA3.flash_attn_varlen_func(q, k, v, *lens, **options, return_attn_probs=True)
    older = fa3_of_2_8_0(q, k, v, *lens, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, older, strict=True))
    return got


def fa3_paged(q: Any, k: Any, v: Any, **options: Any) -> Any:
    (keys, table), (values, _) = paged(k), paged(v)
    given = {"cache_seqlens": torch.tensor(LENS_K).int(), "page_table": table, "cu_seqlens_q": starts(LENS_Q)}
    more = {"max_seqlen_q": max(LENS_Q), "return_softmax_lse": True}
    return FA3.flash_attn_with_kvcache(q, keys, values, **given, **more, **options)[:2]


CALLS: dict[str, Call] = {one.__name__: one for one in (fa2_packed, fa2_paged, fa3_packed, fa3_paged)}


def bias(sq: int, sk: int, causal: bool, window: Window, slope: float) -> torch.Tensor:
    """[sq, sk]: "Query at position i will only attend to keys between [i + seqlen_k - seqlen_q - window_size[0],
    i + seqlen_k - seqlen_q + window_size[1]] inclusive", and "a bias of -alibi_slope * |i + seqlen_k - seqlen_q - j|".
    """
    out = torch.zeros(sq, sk, dtype=torch.float64)
    for i in range(sq):
        for j in range(sk):
            at = i + sk - sq
            hidden = (causal and j > at) or (window[0] >= 0 and j < at - window[0]) or (0 <= window[1] < j - at)
            out[i, j] = -torch.inf if hidden else -slope * abs(at - j)
    return out


def expected(q: Any, k: Any, v: Any, causal: bool, window: Window, cap: float, slopes: Any) -> Any:
    """Head by head in float64; the heads of a group lie side by side."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[1], len(q), dtype=torch.float64)
    first_q = first_k = 0
    for sq, sk in zip(LENS_Q, LENS_K, strict=True):
        rows, keys = slice(first_q, first_q + sq), slice(first_k, first_k + sk)
        for head in range(q.shape[1]):
            scores = SCALE * q[rows, head].double() @ k[keys, head // group].double().T
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores + bias(sq, sk, causal, window, 0.0 if slopes is None else float(slopes[head]))
            lse[head, rows] = scores.logsumexp(1)
            weights = (scores - lse[head, rows, None]).exp().nan_to_num(0.0)  # no key: -inf - -inf
            out[rows, head] = weights @ v[keys, head // group].double()
        first_q, first_k = first_q + sq, first_k + sk
    return out, lse


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (0, 0)), (True, (2, 0)), (False, (2, 2))]
)
@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_lse_are_as_documented(name: str, causal: bool, window: Window, cap: float) -> None:
    q, k, v = problem()
    slopes = torch.tensor([0.5, 0.1, 0.0, 1.0]) if name.startswith("fa2") and not cap else None
    more = {} if slopes is None else {"alibi_slopes": slopes}
    out, lse = CALLS[name](q, k, v, softmax_scale=SCALE, causal=causal, window_size=window, softcap=cap, **more)
    want, want_lse = expected(q, k, v, causal, window, cap, slopes)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=0)
    lse, empty = lse.double(), want_lse == -torch.inf
    assert bool(lse[empty].isinf().all()) and not out.transpose(0, 1)[empty].any()
    torch.testing.assert_close(lse[~empty], want_lse[~empty], atol=1e-5, rtol=1e-5)
    assert bool(empty.any())


def test_decodes_are_as_documented() -> None:
    """`flash_attn_with_kvcache` of FlashAttention 2: rows [B, 1, H, D], LSE [B, H, 1]."""
    q, k, v = problem()
    last = (starts(LENS_Q)[1:] - 1).long()
    (keys, table), (values, _) = paged(k), paged(v)
    options = {"softmax_scale": SCALE, "causal": True, "window_size": (2, 0), "block_table": table}
    lens = torch.tensor(LENS_K).int()
    rows = q[last].unsqueeze(1)
    got = FA2.flash_attn_with_kvcache(rows, keys, values, cache_seqlens=lens, **options, return_softmax_lse=True)
    out, lse = expected(q, k, v, True, (2, 0), 0.0, None)
    torch.testing.assert_close(got[0][:, 0].double(), out[last], atol=1e-2, rtol=0)
    torch.testing.assert_close(got[1][:3, :, 0].double(), lse.T[last][:3], atol=1e-5, rtol=1e-5)
    assert got[0].shape == (4, 1, 4, 16) and got[1].shape == (4, 4, 1)


DRAWN = {  # by its docstrings, 1 = keep
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_causal_mask_is_the_one_that_is_drawn(name: str) -> None:
    """Zero queries weigh all seen keys alike, and unit vectors as values tell which those are."""
    q, k, v = problem(heads=1, kv_heads=1)
    for rows in v.split(LENS_K):
        rows[:] = torch.eye(16, dtype=v.dtype)[: len(rows), None]
    out, _ = CALLS[name](q * 0, k, v, softmax_scale=SCALE, causal=True)
    for got, sq, sk in list(zip(out.split(LENS_Q), LENS_Q, LENS_K, strict=True))[:2]:
        assert (got[:, 0, :sk] > 0).int().tolist() == DRAWN[sq, sk]


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (2, 0), (2, 2), (3, 1)])
@pytest.mark.parametrize("lens", [(2, 5), (5, 2), (4, 4), (1, 9)])
def test_windows_are_those_of_the_librarys_own_reference(lens: tuple[int, int], window: Window) -> None:
    """`construct_local_mask`, which FlashAttention's tests hold its kernels to, is the formula above."""
    releases = versions.FA2.releases
    path = source_of(releases.distribution, releases.newest, "hopper/test_util.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "construct_local_mask"]
    names: dict[str, Any] = {"torch": torch, "rearrange": lambda rows, pattern: {"s -> s 1": rows[:, None]}[pattern]}
    exec(compile(tree, str(path), "exec"), names)
    hidden = names["construct_local_mask"](*lens, window)
    assert torch.equal(hidden, bias(*lens, window == (-1, 0), window, 0.0).isinf())
