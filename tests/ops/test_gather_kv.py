from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.testing.op_oracles import gather_kv_oracle


@pytest.mark.parametrize("starts", [None, [0, 3, 17]])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_gather(device, path, starts, layout) -> None:
    cache = torch.randn(12, 2, 4, 24) if layout == "HND" else torch.randn(12, 4, 2, 24)
    cache = cache.transpose(1, 2) if layout == "HND" else cache
    table = torch.randint(0, 12, (3, 9), dtype=torch.int32)
    table[2, -1] = 99
    lens = [5, 0, 21]
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    key, value = ops.gather_kv(
        cache.to(device),
        cache[..., :8].to(device),
        table.to(device),
        cu.to(device),
        29,
        starts=None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
        path=path,
    )
    want = gather_kv_oracle(cache, table.tolist(), lens, starts or [0, 0, 0], 29)
    assert torch.equal(key.cpu(), want)
    assert value is not None and torch.equal(value.cpu(), want[..., :8])
    assert not key[26:].any() and key[:26].any()


def test_without_values(device, path) -> None:
    cache, table = torch.randn(3, 4, 1, 8, device=device), torch.tensor([[2]], dtype=torch.int32, device=device)
    key, value = ops.gather_kv(cache, None, table, torch.tensor([0, 3], dtype=torch.int32, device=device), 3, path=path)
    assert value is None and torch.equal(key, cache[2, :3])
