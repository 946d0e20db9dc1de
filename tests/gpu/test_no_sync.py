"""A layer call waits for nothing: neither a backend's forward, nor a write, nor a build that knows its lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends.peers import FA2, FA3, FA3_FP8, FLASHINFER, TORCH, TRITON, Peer

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, ops, plan_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lens", [([1, 1, 1], [40, 300, 17]), ([1, 30, 5], [40, 300, 17])], ids=["decode", "mixed"])
@pytest.mark.parametrize("peer", [TRITON, TORCH, FA2, FA3, FA3_FP8, FLASHINFER], ids=lambda peer: peer.name)
@pytest.mark.usefixtures("no_waiting")
def test_a_step(peer: Peer, lens: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_FLASH_ATTN", peer.version)
    if not peer.load().availability().ok:
        pytest.skip(f"{peer.name} is not installed")
    size = 256 if peer is FA2 else 16
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    form = {"kv_cache_dtype": peer.kv_cache_dtype}
    layer = Attention(8, 128, 2, block_size=size, backend=peer.backend, clean_cache=True, **form, **kind)
    cache = PagedKVCache(1, 64, size, 2, 128, **form, **kind)
    table = torch.arange(60, dtype=torch.int32, device="cuda").view(3, 20)
    common = CommonAttentionMetadata.from_lengths(*lens, table, block_size=size)
    query, key, value = (torch.randn(sum(lens[0]), heads, 128, **kind) for heads in (8, 2, 2))
    layer(query, key, value, cache.layer(0), plan_step([layer], common))  # compiles, loads, allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    layer(query, key, value, cache.layer(0), plan_step([layer], common))
    with pytest.raises(RuntimeError, match="synchronizing"):
        query.sum().item()  # the mode works


@pytest.mark.parametrize("path", ["csrc", "triton", "torch"])
@pytest.mark.usefixtures("no_waiting")
def test_ops(path: str) -> None:
    if path == "csrc" and ops.path_of("reshape_and_cache", torch.device("cuda")) != "csrc":
        pytest.skip("the extension is not built")
    rows = torch.randn(5, 2, 64, device="cuda", dtype=torch.bfloat16)
    caches = [torch.zeros(8, 16, 2, 64, device="cuda", dtype=dtype) for dtype in (rows.dtype, torch.float8_e4m3fn)]
    slots, table = (
        torch.tensor([3, -1, 40, 9, 1000], device="cuda"),
        torch.zeros(1, 2, dtype=torch.int32, device="cuda"),
    )
    lens, pairs = torch.tensor([0, 20], dtype=torch.int32, device="cuda"), torch.tensor([[0, 3], [1, 4]])
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        for cache in caches:
            ops.reshape_and_cache(rows, rows, cache, cache, slots, path=path)
            ops.gather_kv(cache, cache, table, lens, 20, path=path)
        ops.copy_blocks(caches, pairs, path=path)
        ops.swap_blocks(caches[0], caches[0].clone(), pairs, path=path)
