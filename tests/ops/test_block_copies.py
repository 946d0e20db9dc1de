from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError
from pagedattn.testing.op_oracles import copy_blocks_oracle

PAIRS = [[0, 5], [3, 1], [7, 2]]
CHAIN = [[0, 1], [1, 2], [2, 0]]


@pytest.mark.parametrize("pairs", [PAIRS, CHAIN, []], ids=["disjoint", "overlapping", "none"])
@pytest.mark.parametrize("width", [1, 7, 64, 2050])
def test_copy_blocks(device, path, pairs, width) -> None:
    caches = [torch.randint(0, 255, (9, width), dtype=torch.uint8, device=device) for _ in range(3)]
    wanted = [copy_blocks_oracle(cache.cpu(), cache.cpu(), pairs) for cache in caches]
    ops.copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2), path=path)
    assert all(torch.equal(cache.cpu(), want) for cache, want in zip(caches, wanted, strict=True))


@pytest.mark.parametrize("way", ["same", "out", "in"])
def test_swap_blocks(device, path, way) -> None:
    host = torch.device("cpu")
    src_device, dst_device = {"same": (device, device), "out": (device, host), "in": (host, device)}[way]

    def tensor(where: torch.device, blocks: int) -> torch.Tensor:
        data = torch.randn(blocks, 4, 6, dtype=torch.float32)
        return data.pin_memory() if where == host and device.type == "cuda" else data.to(where)

    source, target = tensor(src_device, 9), tensor(dst_device, 11)
    pairs = torch.tensor([[8, 10], [0, 3], [1, 0]])
    want = copy_blocks_oracle(source.cpu(), target.cpu(), pairs.tolist())
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    ops.swap_blocks(source, target, pairs, stream=stream, path=path)
    if stream is not None:
        stream.synchronize()
    assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([[0, 9]], "target blocks in"),
        ([[-1, 2]], "source blocks in"),
        ([[0, 2], [1, 2]], "each target at most once"),
    ],
)
def test_bad_pairs_copy_nothing(device, pairs, match) -> None:
    cache = torch.randn(9, 4, device=device)
    before, other = cache.clone(), torch.zeros(9, 4, device=device)
    with pytest.raises(InvalidInputError, match=match):
        ops.copy_blocks([cache], torch.tensor(pairs))
    with pytest.raises(InvalidInputError, match=match):
        ops.swap_blocks(cache, other, torch.tensor(pairs))
    assert torch.equal(cache, before) and not other.any()


def test_swap_within_one_tensor_is_refused(device) -> None:
    cache = torch.randn(9, 4, device=device)
    with pytest.raises(InvalidInputError, match="copy_blocks"):
        ops.swap_blocks(cache, cache, torch.tensor([[0, 1]]))
