"""A cache of more than 2^31 elements: the top blocks are written and read at their own place."""

from __future__ import annotations

import pytest
import torch
from backends.peers import FA2, FA3, FLASHINFER, TORCH, TRITON, Peer

from pagedattn import CommonAttentionMetadata, PagedKVCache, paged_attention
from pagedattn.testing import assert_close, attention_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, DIM = 8, 128


@pytest.mark.parametrize("peer", [TRITON, TORCH, FA2, FA3, FLASHINFER], ids=lambda peer: peer.name)
@pytest.mark.parametrize("query_lens", [[1, 1], [40, 7]], ids=["decode", "prefill"])
def test_top_blocks(peer: Peer, query_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    if not peer.load().availability().ok:
        pytest.skip(f"{peer.name} is not installed")
    options = {"backend": peer.backend, "clean_cache": True}
    size = 256 if peer is FA2 else 16
    elements = size * HEADS * DIM * 2
    blocks = 2**32 // elements + 64
    cache = PagedKVCache(1, blocks, size, HEADS, DIM, dtype=torch.float16, device="cuda")
    assert cache.slabs.view(torch.float16).numel() > 2**32
    seq_lens = [48, 33]
    table = torch.arange(blocks - 6, blocks, dtype=torch.int32, device="cuda").flip(0).view(2, 3)
    keys = [torch.randn(n, HEADS, DIM, dtype=torch.float16, device="cuda") for n in seq_lens]
    values = [torch.randn_like(k) for k in keys]
    everything = CommonAttentionMetadata.from_lengths(seq_lens, seq_lens, table, block_size=size)
    k, v = torch.cat(keys), torch.cat(values)
    query = torch.randn(sum(seq_lens), HEADS, DIM, dtype=torch.float16, device="cuda")
    paged_attention(query, k, v, cache.layer(0), everything, **options)
    written = sum(-(-n // size) for n in seq_lens)
    assert int((cache.slabs != 0).any(-1).sum()) == written, "blocks other than those at the top were written"

    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size=size)
    query = torch.randn(sum(query_lens), HEADS, DIM, dtype=torch.float16, device="cuda")
    out, _ = paged_attention(query, None, None, cache.layer(0), common, **options)
    parts = query.split(query_lens)
    scale = DIM**-0.5
    for dtype in (torch.float64, torch.float16):
        answers = [
            attention_oracle(q, *kv, scale=scale, dtype=dtype)[0] for q, *kv in zip(parts, keys, values, strict=True)
        ]
        if dtype == torch.float64:
            expected = torch.cat(answers)
        else:
            assert_close("top blocks", out, expected, torch.cat(answers))
