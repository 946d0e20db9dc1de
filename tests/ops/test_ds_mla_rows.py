"""Rows of `fp8_ds_mla`: their bytes by the definition, the layer over them, and what does not fit."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from pagedattn import (
    AttentionSpec,
    CommonAttentionMetadata,
    FullAttentionSpec,
    MLAAttention,
    MLASpec,
    PagedKVCache,
    ops,
    select_backend,
)
from pagedattn.backends.registry import get_backend
from pagedattn.errors import InvalidInputError, NoBackendError
from pagedattn.formats.mla_rows import deepseek
from pagedattn.testing import Case, attention_oracle, check, interpreted, make_problem, mla_expanded_oracle

L, R, H, N, V, S = 512, 64, 3, 16, 12, 8
NAME = "fp8_ds_mla"


def by_definition(row: torch.Tensor) -> bytes:
    """One row [576], byte by byte: 512 codes, four float32 scales, 64 of bfloat16."""
    codes, scales = b"", b""
    for group in row[:512].float().split(128):
        scale = group.abs().max() / torch.tensor(448.0)
        codes += bytes((group / scale).to(torch.float8_e4m3fn).view(torch.uint8).tolist())
        scales += struct.pack("<f", float(scale))
    return codes + scales + bytes(row[512:].bfloat16().view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_bytes_are_those_of_the_definition(device, path: str, dtype: torch.dtype) -> None:
    if path == "triton" and dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    magnitude = torch.logspace(-4, 2, 4).repeat_interleave(128)  # of groups apart
    rows = torch.randn(5, 576)
    rows[:, :512] *= magnitude
    latent, k_pe = rows.to(device, dtype).split((L, R), 1)
    cache = torch.full((3, 4, 1, 656), 0x55, dtype=torch.uint8, device=device)
    slots = [7, -1, 0, 12, 11]
    ops.concat_and_cache_mla(latent, k_pe, cache, torch.tensor(slots, device=device), path=path)
    flat, stored = cache.cpu().view(12, 656), torch.cat((latent, k_pe), 1).cpu()
    for slot in range(12):
        want = by_definition(stored[slots.index(slot)].float()) if slot in slots else bytes([0x55] * 656)
        assert bytes(flat[slot].tolist()) == want, slot
    back = deepseek.decode(flat[11], torch.float64)
    error = (back - stored[4].double()).abs()
    assert bool((error[:512].view(4, 128) <= 2**-4 * stored[4, :512].double().view(4, 128).abs().amax(1, True)).all())
    assert torch.equal(back[512:], stored[4, 512:].bfloat16().double())


def test_a_group_of_zeros_and_the_smallest_elements(device, path: str) -> None:
    latent, k_pe = torch.zeros(1, L, device=device), torch.zeros(1, R, device=device)
    latent[0, 128:256] = 2.0**-130
    latent[0, 300] = torch.finfo(torch.float32).max
    cache = torch.full((1, 1, 1, 656), 0xFF, dtype=torch.uint8, device=device)
    ops.concat_and_cache_mla(latent, k_pe, cache, torch.tensor([0], device=device), path=path)
    back = deepseek.decode(cache[0, 0, 0], torch.float64).cpu()
    assert not bool(back[:128].any()) and not bool(back[512:].any()) and bool(back.isfinite().all())
    assert float(back[300]) == pytest.approx(torch.finfo(torch.float32).max, rel=1e-6)


FORMS = {"absorbed": 1 << 20, "expanded": 0, "decodes absorbed": 1}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_layer_is_the_oracle_over_stored_rows(form: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = MLAAttention(H, L, R, N, V, 0.05, kv_cache_dtype=NAME, max_absorbed_len=FORMS[form], device="cpu")
    spec = MLASpec(head_dim=L + R, latent_dim=L, block_size=S, kv_cache_dtype=NAME)
    cache = PagedKVCache.from_specs([spec], 12)
    assert cache.nbytes == 12 * S * 656 and cache.layer(0).value.data_ptr() == cache.layer(0).key.data_ptr()
    cache.layer(0).key.fill_(0x7F)  # NaN in every part
    table = torch.tensor([[3, 1, 7], [5, 2, 9]], dtype=torch.int32)
    tokens, weight = [normal(20, L + R), normal(9, L + R)], normal(H * (N + V), L) * 0.1
    w_uk, w_uv = layer.split_kv_b(weight)
    for query_lens, seq_lens in (([13, 8], [13, 8]), ([7, 1], [20, 9])):
        queries = normal(sum(query_lens), H, N), normal(sum(query_lens), H, R)
        new = torch.cat([x[end - n : end] for x, n, end in zip(tokens, query_lens, seq_lens, strict=True)])
        common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size=S)
        got, want, start = layer(*queries, new[:, :L], new[:, L:], w_uk, w_uv, cache.layer(0), common), [], 0
        for seen, n, end in zip(tokens, query_lens, seq_lens, strict=True):
            mine, start = slice(start, start + n), start + n
            rows = deepseek.decode(deepseek.encode(seen[:end]), torch.float64)
            want.append(
                mla_expanded_oracle(
                    queries[0][mine], queries[1][mine], rows[:, :L], rows[:, L:], w_uk, w_uv, scale=0.05
                )[0]
            )
        torch.testing.assert_close(got.double(), torch.cat(want), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("magnitude", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("heads", [3, 40])
def test_products_of_codes_in_float16(device, heads: int, magnitude: float) -> None:
    if not (device.type == "cuda" or interpreted()):
        pytest.skip("TRITON serves the CPU only when interpreted")
    sizes: dict[str, Any] = {"heads": (heads, 1), "latent_dim": L, "head_dim": L + R, "dtype": torch.float16}
    lens: dict[str, Any] = {"query_lens": (1, 1), "seq_lens": (70, 9), "kv_cache_dtype": NAME}
    case = Case(**sizes, **lens, scale=0.05 / magnitude**2, magnitude=magnitude)
    check(get_backend("TRITON"), make_problem(case, device))


def test_blocks_are_copied_and_swapped_with_their_scales() -> None:
    spec = MLASpec(head_dim=L + R, latent_dim=L, block_size=4, dtype=torch.bfloat16, kv_cache_dtype=NAME)
    cache, other = (PagedKVCache.from_specs([spec] * 2, 5) for _ in range(2))
    for index in range(2):
        cache.layer(index).key.random_(256)
    cache.copy_blocks([(1, 3)])
    cache.swap_blocks(other, [(3, 0)])
    for index in range(2):
        assert torch.equal(other.layer(index).key[0], cache.layer(index).key[1])


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_blocks_outside_the_cache_are_not_followed(device, path: str, bad: int) -> None:
    """Block 0, which could be read in their place, is NaN: codes, scales and rotated parts."""
    rows, query = deepseek.encode(torch.randn(3, 4, 1, L + R)), torch.randn(1, H, L + R)
    rows[0] = 0xFF
    table, starts, lens = ([[2, bad, 1]], [0, 1], [12])
    given = (torch.tensor(x, dtype=torch.int32, device=device) for x in (table, starts, lens))
    sizes: dict[str, Any] = {"latent_dim": L, "max_query_len": 1, "max_seq_len": 12, "scale": 0.05}
    got = ops.mla_decode(query.to(device), rows.to(device), *given, **sizes, path=path)
    seen = deepseek.decode(rows[[2, 1]].flatten(0, 1), torch.float64)
    want, _ = attention_oracle(query, seen, seen[..., :L], scale=0.05)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


def attend_as_to_keys() -> torch.Tensor:
    """`paged_attention` over rows of one block, called with all that they need."""
    rows, zero = torch.zeros(2, 4, 1, 656, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    tensors = (torch.zeros(1, H, 576), rows, rows, zero, starts, lens)
    bounds: dict[str, Any] = {"max_query_len": 1, "max_seq_len": 1, "scale": 0.1, "kv_cache_dtype": NAME}
    return ops.paged_attention(*tensors, out=torch.zeros(1, H, L), **bounds)


def test_what_does_not_fit_is_refused() -> None:
    latent, k_pe, slots = torch.zeros(1, L), torch.zeros(1, R), torch.tensor([0])
    wide = torch.zeros(2, 4, 1, 660, dtype=torch.uint8)
    sizes: tuple[Any, ...] = (H, L, R, N, V, 0.1)
    of_keys: dict[str, Any] = {"head_dim": 576, "kv_cache_dtype": NAME}
    refused: list[tuple[str, Any]] = [
        ("latent must be", lambda: ops.concat_and_cache_mla(latent[:, :256], k_pe, wide[..., :656], slots)),
        ("rows must be", lambda: ops.concat_and_cache_mla(latent, k_pe, wide, slots)),
        ("rows must be", lambda: ops.concat_and_cache_mla(latent, k_pe, wide[..., 1:657], slots)),
        ("k_scale, v_scale, kv_scale must be", lambda: MLAAttention(*sizes, kv_cache_dtype=NAME, k_scale=2.0)),
        ("head_dim must be 576", lambda: MLASpec(head_dim=40, latent_dim=32, kv_cache_dtype=NAME)),
        ("head_dim must be 576", lambda: MLAAttention(H, 32, 8, N, V, 0.1, kv_cache_dtype=NAME)),
        ("kv_cache_dtype must be a format of keys", lambda: FullAttentionSpec(num_kv_heads=1, **of_keys)),
        ("kv_cache_dtype must be .*; attend to latent rows by mla_decode", attend_as_to_keys),
    ]
    for message, call in refused:
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            call()
    spec = AttentionSpec(num_heads=4, head_dim=576, head_dim_v=512, kv_cache_dtype=NAME)
    with pytest.raises(NoBackendError, match="TORCH: kv_cache_dtype=fp8_ds_mla"):
        select_backend(spec)
