"""Prompts over a copy of a quantised cache: what is copied, and when. Outputs: backends/test_dequantised_prompts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache, ops
from pagedattn.formats.registry import stored_as
from pagedattn.kernels.dequantise import kernel
from pagedattn.kernels.dequantise.plan import MOST_BYTES, pays
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.shape import AttentionShape, BatchBounds

SHAPE = AttentionShape(
    torch.bfloat16, torch.int8, 8, 4, 128, 128, Mask(causal=True).constants, False, True, False, 16, ("int8", "int8")
)
PROMPT = BatchBounds(1 << 14, 1, 0, 1 << 14, 1 << 14, 1 << 14)


@pytest.mark.parametrize("name", ["int8", "k8v4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_are_what_their_codes_stand_for(name: str, layout: str) -> None:
    heads, dim, value_dim, size = 2, 64, 48, 16
    caches = PagedKVCache(1, 12, size, heads, dim, head_dim_v=value_dim, kv_cache_dtype=name, layout=layout)
    cache, make = caches.layer(0), torch.Generator().manual_seed(0)
    key, value = torch.randn(192, heads, dim, generator=make), torch.randn(192, heads, value_dim, generator=make)
    scales: dict[str, Any] = {}
    if name.startswith("fp8"):
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0, 0.25])}
    ops.reshape_and_cache(key, value, cache.key, cache.value, torch.arange(192), path="torch", **scales, **cache.stored)
    table = torch.tensor([[7, 3, 99, 0, 5], [2, 11, -1, 4, 6]], dtype=torch.int32)  # 99 and -1 are no blocks
    lens = torch.tensor([70, 21], dtype=torch.int32)
    query, starts = torch.zeros(2, heads, dim), torch.tensor([0, 1, 2], dtype=torch.int32)
    out = torch.empty(2, heads, value_dim)
    given = (query, cache.key, cache.value, table, starts, lens, None, None)
    rest = (scales.get("k_scale"), scales.get("v_scale"), out, None, 1.0, 3.0, Mask(causal=True).constants, 0.0)
    stored = (cache.key_scale, cache.value_scale, cache.stored["kv_cache_dtype"])
    made = kernel.launch(AttentionInputs(*given, *rest, 1, 80, 0, False, *stored))
    assert made.format is stored_as("auto", torch.float32) and made.out_scale == 3.0 and made.k_scale is rest[0]
    assert made.block_table is not None
    assert made.block_table.tolist() == [[0, 1, -1, 3, 4], [5, 6, -1, -1, -1]]
    form = stored_as(stored[2], cache.key.dtype)
    exact = [
        rows.decode(side, copy.shape[-1], torch.float32)
        for rows, side, copy in ((form.key, cache.sides[0], made.key), (form.value, cache.sides[1], made.value))
    ]
    assert (made.k_scale_cache is None) == (cache.key_scale is None) and made.v_scale_cache is None
    for seq, length in enumerate(lens.tolist()):
        for at in range(length):
            to, block, slot = int(made.block_table[seq, at // size]), int(table[seq, at // size]), at % size
            if made.k_scale_cache is not None:
                factor = made.k_scale_cache[seq, :, at]
            if to < 0:
                assert made.k_scale_cache is None or not factor.any()
                continue
            key_row = made.key[to, slot]
            if made.k_scale_cache is not None:
                assert torch.equal(key_row, key_row.round()), "integers, exactly"
                key_row = key_row * factor[:, None]
            torch.testing.assert_close(key_row, exact[0][block, slot])
            torch.testing.assert_close(made.value[to, slot], exact[1][block, slot], rtol=1e-5, atol=1e-5)


def test_a_copy_has_64_mib_at_most() -> None:
    assert pays(SHAPE, PROMPT), "16k tokens of 8 heads are as many"
    assert 2 * (1 << 14) * 8 * 256 == MOST_BYTES
    assert not pays(SHAPE, PROMPT._replace(max_seq_len=(1 << 14) + 1, max_keys=0))
    assert pays(SHAPE, PROMPT._replace(max_seq_len=1 << 20)), "there are no more keys than the table has room for"
    assert not pays(SHAPE, PROMPT._replace(num_seqs=2)) and pays(SHAPE, PROMPT._replace(num_seqs=65, num_decodes=64))


def test_it_pays_where_many_queries_see_most_keys() -> None:
    assert pays(SHAPE, PROMPT._replace(max_query_len=128)) and not pays(SHAPE, PROMPT._replace(max_query_len=127))
    fp8 = SHAPE._replace(stored_dtype=torch.float8_e4m3fn, codes=("e4m3", "e4m3"))
    assert pays(fp8, PROMPT._replace(max_query_len=256)) and not pays(fp8, PROMPT._replace(max_query_len=255))
    window = SHAPE._replace(mask=Mask(causal=True, sliding_window=1000).constants)
    assert not pays(window, PROMPT._replace(max_query_len=2000)) and pays(window, PROMPT._replace(max_query_len=8000))
    for other in ({"codes": (None, None)}, {"block_size": None}, {"paged": False}):
        assert not pays(SHAPE._replace(**other), PROMPT), other
