"""paged_attention(accumulate=True): what outputs hold is taken up, as if all keys had been attended to at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache, ops
from pagedattn.errors import InvalidInputError

SIZE, HEADS, KV_HEADS = 16, 8, 2
GPU = torch.cuda.is_available()
# On Hopper, decodes over codes add within their kernel.
STORED = ("auto", "int8", "fp8_e4m3", "k8v4") if GPU else ("auto", "int8")
LENS = [((40, 0, 17, 300), (33, 16, 0, 2000)), ((5,), (9000,)), ((0,), (0,))]


def cached(lens: tuple[int, ...], stored: str, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """A cache of random rows, as the op takes it, and its block table."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16 if GPU else torch.float32, "device": device}
    columns, dim = max(-(-max(lens) // SIZE), 1), 128 if GPU else 32
    blocks = columns * len(lens)
    cache = PagedKVCache(1, blocks, SIZE, KV_HEADS, dim, kv_cache_dtype=stored, **kind).layer(0)
    rows = torch.randn(2, blocks * SIZE, KV_HEADS, dim, **kind)
    slots = torch.arange(blocks * SIZE, device=device)
    ops.reshape_and_cache(rows[0], rows[1], cache.key, cache.value, slots, **cache.stored)
    table = torch.randperm(blocks, device=device).int().view(len(lens), columns)
    return {"key": cache.key, "value": cache.value, "block_table": table, **cache.stored}, rows


def attended(query: torch.Tensor, tokens: int, lens: tuple[int, ...], cache: dict[str, Any], **options: Any) -> None:
    count, device = len(lens), query.device
    ops.paged_attention(
        query,
        **cache,
        query_start_loc=torch.arange(count + 1, device=device, dtype=torch.int32) * tokens,
        seq_lens=torch.tensor(lens, device=device, dtype=torch.int32),
        max_query_len=tokens,
        max_seq_len=max(max(lens), 1),
        scale=query.shape[2] ** -0.5,
        mask=Mask(causal=False),
        **options,
    )


@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize("stored", STORED)
def test_the_union_of_keys(device: torch.device, path: str, stored: str, tokens: int) -> None:
    for first, second in LENS if GPU else [*LENS[:1], LENS[2]]:
        first, second = (tuple(n if GPU else n % 100 for n in lens) for lens in (first, second))
        (before, rows), (cache, _) = (cached(lens, name, device) for lens, name in ((first, "auto"), (second, stored)))
        query = torch.randn(len(first) * tokens, HEADS, rows.shape[-1], dtype=rows.dtype, device=device)
        states, lses = query.new_zeros(2, *query.shape), query.new_zeros(2, *query.shape[:2], dtype=torch.float32)
        sinks = torch.randn(HEADS, dtype=rows.dtype, device=device) if max(first) else None
        attended(query, tokens, first, before, out=states[0], lse=lses[0], sinks=sinks, path=path)
        attended(query, tokens, second, cache, out=states[1], lse=lses[1], path=path)
        want, want_lse = ops.merge_attn_states(states, lses, path=path)
        out, lse = states[0].clone(), lses[0].clone()
        attended(query, tokens, second, cache, out=out, lse=lse, accumulate=True, path=path)
        close: dict[str, Any] = {"atol": 8e-3, "rtol": 8e-3} if GPU else {"atol": 1e-6, "rtol": 1e-6}
        torch.testing.assert_close(out, want, **close)
        torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
        kept = torch.tensor(second, device=device).repeat_interleave(tokens) == 0
        assert torch.equal(out[kept], states[0][kept]), "rows of no key here were changed"
        assert kept.all() or float((out - states[0])[~kept].abs().max()) > 0.01


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("stored", STORED)
def test_what_is_not_rounded_between(device: torch.device, path: str, stored: str, tokens: int) -> None:
    """Outputs over the first keys as float32, which those over the others are added to: rounded once, at the end."""
    lens = tuple(n if GPU else n % 100 for n in LENS[0][0])
    (before, rows), (cache, _) = (cached(lens, name, device) for name in ("auto", stored))
    query = torch.randn(len(lens) * tokens, HEADS, rows.shape[-1], device=device).to(torch.float16)
    before = {name: x.to(torch.float16) if name in ("key", "value") else x for name, x in before.items()}
    if stored == "auto":
        cache = {**cache, "key": cache["key"].to(torch.float16), "value": cache["value"].to(torch.float16)}
    states, lses = query.new_zeros(2, *query.shape, dtype=torch.float32), query.new_zeros(2, *query.shape[:2]).float()
    attended(query, tokens, lens, before, out=states[0], lse=lses[0], path=path)
    attended(query, tokens, lens, cache, out=states[1], lse=lses[1], path=path)
    assert not torch.equal(states, states.half().float()), "rounded already"
    want, want_lse = ops.merge_attn_states(states, lses, path=path)
    out, lse = torch.full_like(query, torch.nan), lses[0].clone()
    attended(query, tokens, lens, cache, out=out, lse=lse, prior=states[0], path=path)
    torch.testing.assert_close(out, want.half(), atol=1e-7, rtol=2**-9)  # a unit of subnormal numbers is 6e-8
    assert float((out != want.half()).float().mean()) < 0.01, "rounded twice"
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


def test_what_is_added_to_has_a_shape_and_a_dtype(device: torch.device, path: str) -> None:
    cache, rows = cached((5,), "auto", device)
    query = torch.zeros(1, HEADS, rows.shape[-1], dtype=rows.dtype, device=device)
    given = {"out": torch.zeros_like(query), "lse": torch.zeros(1, HEADS, device=device), "path": path}
    for prior in (torch.zeros_like(query, dtype=torch.float16), torch.zeros(1, HEADS, 8, device=device)):
        with pytest.raises(InvalidInputError, match=r"^prior must be float32 "):
            attended(query, 1, (5,), cache, prior=prior, **given)


def test_it_needs_the_lse_of_what_is_there(device: torch.device, path: str) -> None:
    cache, rows = cached((5,), "auto", device)
    query = torch.zeros(1, HEADS, rows.shape[-1], dtype=rows.dtype, device=device)
    with pytest.raises(InvalidInputError, match=r"^lse must be what `out` has the outputs of, with accumulate=True"):
        attended(query, 1, (5,), cache, out=torch.zeros_like(query), accumulate=True, path=path)
