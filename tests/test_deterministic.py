"""deterministic=True: a token's output has the same bits alone, in any batch, and in any chunking of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from pagedattn import AttentionSpec, CommonAttentionMetadata, PagedKVCache, ops, paged_attention, select_backend
from pagedattn.errors import UnsupportedError

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIZE, HEADS, KV_HEADS = 16, 8, 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if GPU else (torch.float32,)
# The prompt asked about, then what else is in its batch.
LENGTH, OTHERS = (1500, (700, 1, 33, 2048)) if GPU else (90, (40, 1, 33))


class Cached:
    """Sequences whose keys are all in one cache, so that any rows of theirs can be attended again."""

    def __init__(
        self, lens: Sequence[int], dtype: torch.dtype, dim: int, kv_cache_dtype: str = "auto", **options: object
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lens, self.options, self.columns = lens, options, -(-max(lens) // SIZE)
        blocks = len(lens) * self.columns + 1
        kind: dict[str, Any] = {"dtype": dtype, "device": DEVICE, "kv_cache_dtype": kv_cache_dtype}
        self.cache = PagedKVCache(1, blocks, SIZE, KV_HEADS, dim, **kind)
        layer = self.cache.layer(0)
        rows = torch.randn(2, blocks * SIZE, KV_HEADS, dim, generator=generator).to(DEVICE, dtype)
        slots = torch.arange(blocks * SIZE, device=DEVICE)
        scales: dict[str, Any] = {"k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale}
        ops.reshape_and_cache(rows[0], rows[1], layer.key, layer.value, slots, kv_cache_dtype=kv_cache_dtype, **scales)
        self.table = torch.randperm(blocks, generator=generator)[: blocks - 1].int().view(len(lens), -1).to(DEVICE)
        self.query = [torch.randn(n, HEADS, dim, generator=generator).to(DEVICE, dtype) for n in lens]

    def attend(self, rows: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Outputs of rows first..last of the sequences named, computed in one call."""
        table = self.table[list(rows)]
        lens = [last - first for first, last in rows.values()], [last for _, last in rows.values()]
        common = CommonAttentionMetadata.from_lengths(*lens, table, block_size=SIZE)
        query = torch.cat([self.query[seq][first:last] for seq, (first, last) in rows.items()])
        options = {"deterministic": True, "backend": "TRITON", **self.options}
        out, _ = paged_attention(query, None, None, self.cache.layer(0), common, **options)  # type: ignore[arg-type]
        return dict(zip(rows, out.split(lens[0]), strict=True))


FEATURES = (
    {},
    {"sliding_window": 40},
    {"softcap": 4.0, "alibi_slopes": 2.0 ** -torch.arange(1.0, HEADS + 1)},
    {"sliding_window": 40, "softcap": 4.0, "sinks": torch.linspace(-2, 3, HEADS)},
)


@pytest.mark.parametrize("features", FEATURES, ids=["plain", "window", "cap and slopes", "window, cap and sinks"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256] if GPU else [32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(dtype: torch.dtype, dim: int, features: dict[str, Any]) -> None:
    features = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    check(Cached((LENGTH, *OTHERS), dtype, dim, **features))


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3", "k8v4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_of_codes(dtype: torch.dtype, stored: str) -> None:
    check(Cached((LENGTH, *OTHERS), dtype, 128 if GPU else 32, stored))


def check(cached: Cached) -> None:
    whole = cached.attend({0: (0, LENGTH)})[0]
    assert bool(torch.isfinite(whole).all())
    batch = {0: (0, LENGTH)} | {seq: (0, n) for seq, n in enumerate(OTHERS, start=1)}
    assert torch.equal(cached.attend(batch)[0], whole), "in a batch"
    assert torch.equal(cached.attend(dict(reversed(batch.items())))[0], whole), "at the end of a batch"
    pieces = 0
    for cuts in ((0, 1, 2, 17, LENGTH - 1, LENGTH), (0, LENGTH // 2, LENGTH), (0, 16, 48, 64, LENGTH)):
        for first, last in pairwise(cuts):
            got = cached.attend({0: (first, last), 1: (0, OTHERS[0])})[0]
            assert torch.equal(got, whole[first:last]), f"rows {first}..{last} as a chunk"
            pieces += 1
    decodes = {0: (LENGTH - 1, LENGTH)} | {seq: (n - 1, n) for seq, n in enumerate(OTHERS, start=1) if n > 1}
    assert torch.equal(cached.attend(decodes)[0], whole[-1:]), "as a decode"
    assert pieces == 11


def test_only_who_is_tested_claims_it() -> None:
    kind = {"device_type": "cuda", "dtype": torch.float16, "deterministic": True, "clean_cache": True}
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, block_size=256, capability=(9, 0), **kind)
    assert select_backend(spec).name == "TRITON"
    for name in ("FLASH_ATTN", "FLASHINFER", "TORCH"):
        assert "deterministic" in {reason.feature for reason in select_backend(spec).rejections[name]} | _missing(name)
    with pytest.raises(UnsupportedError, match="deterministic=True"):
        select_backend(spec, "TORCH")


def _missing(name: str) -> set[str]:
    """Where the library is not installed, that is the only reason given."""
    from pagedattn.backends.registry import get_backend

    return set() if get_backend(name).availability().ok else {"deterministic"}
