"""seal_blocks over formats that encode each row alone, once a window has passed a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covers import beside
from format_rows import device_of

from pagedattn import PagedKVCache, ops
from pagedattn.formats.registry import format_of


@pytest.mark.cover(by=beside("path"))
@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("size", [5, 37, 40, 64])
@pytest.mark.parametrize("stored", ["int8:window=1", "k8v4:window=70", "turboquant_k3v4:window=1"])
def test_a_block_is_encoded_row_by_row(stored: str, size: int, path: str) -> None:
    """By formats that encode each row alone: blocks 1 and 2 of a sequence that its step put behind the window."""
    dims, form = (40, 24), format_of(stored)
    device = device_of(path)
    rows = [torch.randn(6, size, 3, dim, generator=torch.Generator().manual_seed(dim)).to(device) for dim in dims]
    given: dict[str, Any] = {"kv_cache_dtype": stored, "recent_blocks": 1, "device": device}
    cache = PagedKVCache(1, 5, size, 3, dims[0], head_dim_v=dims[1], **given)
    layer, before = cache.layer(0), -(-int(stored.partition("=")[2]) // size)
    length = (3 + before) * size + 1
    table = torch.tensor([[0, 1, 3, *[4] * before, 9, 9]]).int()
    recent_table = torch.tensor([[-1, 4, 2, *[5] * before, 9, 9]]).int()
    table, recent_table = table.to(device), recent_table.to(device)
    lengths = (torch.tensor([0, 2 * size]).int().to(device), torch.tensor([length]).int().to(device))
    planes: dict[str, Any] = {"k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale}
    options: dict[str, Any] = {"max_query_len": 3 * size, "kv_cache_dtype": stored, "path": path, **planes}
    key, value = rows
    ops.seal_blocks(key, value, recent_table, layer.key, layer.value, table, *lengths, **options)
    assert not cache.slabs[0, [0, 2, 4]].any()
    for kind, whole, planes_of_side in zip((form.key, form.value), rows, layer.sides, strict=True):
        for plane, wanted in zip(planes_of_side, kind.encode(whole[[4, 2]]), strict=True):
            assert torch.equal(plane[[1, 3]], wanted)
