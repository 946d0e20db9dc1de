from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pagedattn import ops
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.runtime import op_registry
from pagedattn.testing.op_oracles import copy_blocks_oracle

PAIRS = [[0, 5], [3, 1], [7, 2]]
CHAIN = [[0, 1], [1, 2], [2, 0]]
MIXED = [[4, 4], [8, 3], [3, 6], [0, 8]]
BOTH_WAYS = {"same": ("device", "device"), "out": ("device", "host"), "in": ("host", "device")}


@pytest.mark.parametrize("pairs", [PAIRS, CHAIN, MIXED, []], ids=["disjoint", "overlapping", "mixed", "none"])
@pytest.mark.parametrize("width", [1, 7, 64, 2050])
def test_copy_blocks(device, any_path, pairs, width) -> None:
    caches = [torch.randint(0, 255, (9, width), dtype=torch.uint8, device=device) for _ in range(3)]
    wanted = [copy_blocks_oracle(cache.cpu(), cache.cpu(), pairs) for cache in caches]
    ops.copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2), path=any_path)
    assert all(torch.equal(cache.cpu(), want) for cache, want in zip(caches, wanted, strict=True))


def test_caches_of_different_shapes_strides_and_dtypes(device, any_path) -> None:
    """Slices of one slab, a block with a gap behind it, and an address that is no multiple of anything."""
    slab = torch.randint(0, 255, (2, 9, 48), dtype=torch.uint8, device=device)
    gap = torch.randn(9, 100, device=device)
    odd = torch.randint(0, 255, (9 * 33 + 1,), dtype=torch.uint8, device=device)[1:].view(9, 33)
    caches = [slab[0], slab[1], gap[:, :6].unflatten(1, (2, 3)), odd, torch.randn(9, 5, 3, device=device).bfloat16()]
    wanted = [copy_blocks_oracle(cache.cpu(), cache.cpu(), MIXED) for cache in caches]
    rest = gap[:, 6:].clone()
    ops.copy_blocks(caches, torch.tensor(MIXED), path=any_path)
    assert all(torch.equal(cache.cpu(), want) for cache, want in zip(caches, wanted, strict=True))
    assert torch.equal(gap[:, 6:], rest)


@pytest.mark.parametrize("odd_one", ["source", "target"])
def test_swap_between_tensors_of_different_alignment(device, any_path, odd_one) -> None:
    """Blocks of 16 bytes, on one side 2 bytes from where a wider word could begin."""
    odd, even = torch.arange(25, dtype=torch.int16, device=device)[1:].view(3, 8), torch.zeros(3, 8, dtype=torch.int16)
    source, target = (odd, even.to(device)) if odd_one == "source" else (even.to(device), odd)
    want = copy_blocks_oracle(source.cpu(), target.cpu(), [[1, 0], [0, 2]])
    ops.swap_blocks(source, target, torch.tensor([[1, 0], [0, 2]]), path=any_path)
    assert torch.equal(target.cpu(), want)


def test_a_chain_in_a_cache_whose_blocks_are_no_words_apart(device, any_path) -> None:
    """It goes through a staging tensor, whose blocks are."""
    cache = torch.arange(45, dtype=torch.uint8, device=device).view(9, 5)[:, :4]
    want = copy_blocks_oracle(cache.cpu(), cache.cpu(), CHAIN)
    ops.copy_blocks([cache], torch.tensor(CHAIN), path=any_path)
    assert torch.equal(cache.cpu(), want)


@pytest.mark.parametrize(("layers", "blocks"), [(100, 9), (2, 12000)])
def test_more_layers_or_pairs_than_one_launch_holds(device, any_path, layers, blocks) -> None:
    if any_path == "triton" and device.type == "cpu":
        pytest.skip("the interpreter takes minutes for this")
    slab = torch.randint(0, 255, (layers, blocks, 16), dtype=torch.uint8, device=device)
    pairs = torch.stack((torch.arange(blocks // 2), torch.randperm(blocks // 2) + blocks // 2), 1)
    want = slab.clone()
    want[:, pairs[:, 1]] = slab[:, pairs[:, 0]]
    ops.copy_blocks(list(slab), pairs, path=any_path)
    assert torch.equal(slab, want)


def test_transposed_blocks_go_to_torch(device, any_path) -> None:
    def cache() -> torch.Tensor:
        return torch.arange(9 * 4 * 6.0, device=device).view(9, 4, 6).transpose(1, 2)

    want = copy_blocks_oracle(cache().cpu(), cache().cpu(), CHAIN)
    ops.copy_blocks([mine := cache()], torch.tensor(CHAIN))
    assert torch.equal(mine.cpu(), want)
    if any_path != "torch":
        with pytest.raises(UnsupportedError, match="contiguous within a block; use path='torch'"):
            ops.copy_blocks([mine], torch.tensor(CHAIN), path=any_path)
        with pytest.raises(UnsupportedError, match="contiguous within a block"):
            ops.swap_blocks(mine, cache(), torch.tensor(CHAIN), path=any_path)
    assert torch.equal(mine.cpu(), want)


def _host(tensor: torch.Tensor, pinned: bool, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if pinned and device.type == "cuda" else tensor


@pytest.mark.parametrize("way", ["same", "out", "in"])
@pytest.mark.parametrize("width", [6, 1024, 77])
@pytest.mark.parametrize("pairs", [[[8, 10], [0, 3], [1, 4], [2, 5], [3, 9]], []], ids=["some", "none"])
def test_swap_blocks(device, any_path, way, width, pairs) -> None:
    def tensor(where: str, blocks: int) -> torch.Tensor:
        data = torch.randint(0, 255, (blocks, 4, width), dtype=torch.uint8)
        return _host(data, True, device) if where == "host" else data.to(device)

    source, target = tensor(BOTH_WAYS[way][0], 9), tensor(BOTH_WAYS[way][1], 11)
    want = copy_blocks_oracle(source.cpu(), target.cpu(), pairs)
    listed = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    ops.swap_blocks(source, target, listed, stream=stream, path=any_path)
    if stream is not None:
        stream.synchronize()
    assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize("way", ["out", "in"])
def test_pageable_host_memory_is_copied_when_the_call_returns(device, any_path, way) -> None:
    host, on_device = torch.randn(9, 4, 6), torch.randn(9, 4, 6).to(device)
    source, target = (on_device, host) if way == "out" else (host, on_device)
    pairs = torch.tensor(PAIRS)
    if any_path == "triton" and device.type == "cuda":
        with pytest.raises(UnsupportedError, match="pinned host memory"):
            ops.swap_blocks(source, target, pairs, path=any_path)
        return
    want = copy_blocks_oracle(source.cpu(), target.cpu(), pairs.tolist())
    ops.swap_blocks(source, target, pairs, path=any_path)
    if any_path == "torch" and device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target if way == "out" else target.cpu(), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["same", "out", "in"])
@pytest.mark.parametrize("mechanism", [1, 2, 3], ids=["kernel", "batch", "copies"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_every_mechanism_of_swap(device, way, mechanism, side) -> None:
    """9000 blocks in shuffled runs of 3: more pairs than a launch holds, some of them merged."""
    if op_registry.path_of("swap_blocks", device) != "csrc":
        pytest.skip(op_registry.csrc_status())

    def tensor(where: str) -> torch.Tensor:
        data = torch.randint(0, 255, (9000, 2048), dtype=torch.uint8)
        return data.pin_memory() if where == "host" else data.to(device)

    source, target = (tensor(where) for where in BOTH_WAYS[way])
    runs = torch.arange(9000).view(-1, 3)
    pairs = torch.stack((runs[torch.randperm(3000)].flatten(), runs[torch.randperm(3000)].flatten()), 1)
    want = target.cpu().clone()
    want[pairs[:, 1]] = source.cpu()[pairs[:, 0]] + 1
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        source.add_(1)  # on a GPU the copy must wait for it
        torch.ops.pagedattn_csrc.swap_blocks(source, target, pairs, mechanism)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(target.cpu(), want)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([[0, 9]], "target blocks in"),
        ([[-1, 2]], "source blocks in"),
        ([[0, 2], [1, 2]], "each target at most once"),
    ],
)
def test_bad_pairs_copy_nothing(device, any_path, pairs, match) -> None:
    cache = torch.randn(9, 4, device=device)
    before, other = cache.clone(), torch.zeros(9, 4, device=device)
    with pytest.raises(InvalidInputError, match=match):
        ops.copy_blocks([cache], torch.tensor(pairs), path=any_path)
    with pytest.raises(InvalidInputError, match=match):
        ops.swap_blocks(cache, other, torch.tensor(pairs), path=any_path)
    assert torch.equal(cache, before) and not other.any()
    if any_path == "csrc":  # which does not rely on its caller
        with pytest.raises(RuntimeError, match=r"is not in|occurs twice"):
            torch.ops.pagedattn_csrc.copy_blocks([cache], [other], torch.tensor(pairs))
        with pytest.raises(RuntimeError, match=r"is not in|occurs twice"):
            torch.ops.pagedattn_csrc.swap_blocks(cache, other, torch.tensor(pairs), 0)
        assert torch.equal(cache, before) and not other.any()


def test_swap_within_one_tensor_is_refused(device) -> None:
    cache = torch.randn(9, 4, device=device)
    with pytest.raises(InvalidInputError, match="copy_blocks"):
        ops.swap_blocks(cache, cache, torch.tensor([[0, 1]]))


def test_tensors_with_shared_blocks_are_refused() -> None:
    slab = torch.arange(12 * 4.0).view(12, 4)
    before = slab.clone()
    for one, other, pairs in ((slab[:9], slab[3:], [[3, 0]]), (slab[3:], slab[:9], [[1, 2], [0, 3]])):
        with pytest.raises(InvalidInputError, match="share no memory with those of source"):
            ops.swap_blocks(one, other, torch.tensor(pairs))
    shifted = slab.flatten()[2:46].view(11, 4)  # half a block further
    with pytest.raises(InvalidInputError, match="share no memory"):
        ops.swap_blocks(slab, shifted, torch.tensor([[5, 4]]))
    assert torch.equal(slab, before)


def test_views_of_one_storage_whose_blocks_lie_apart(device, any_path) -> None:
    pair = torch.randn(9, 2, 4, 6, device=device)
    want = copy_blocks_oracle(pair[:, 0].cpu(), pair[:, 1].cpu(), PAIRS)
    ops.swap_blocks(pair[:, 0], pair[:, 1], torch.tensor(PAIRS), path=any_path)
    assert torch.equal(pair[:, 1].cpu(), want)
    whole = pair.flatten(1)
    ops.swap_blocks(whole[:6], whole[3:], torch.tensor([[2, 0], [0, 3]]), path=any_path)
    assert torch.equal(whole[[3, 6]], whole[[2, 0]])


def test_tensors_without_memory_are_no_overlap(device, any_path) -> None:
    empty = torch.zeros(9, 0, device=device)
    ops.swap_blocks(empty, torch.zeros(9, 0, device=device), torch.tensor(PAIRS), path=any_path)
    ops.copy_blocks([empty], torch.tensor(PAIRS), path=any_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        source, target = torch.zeros(9, 4), torch.zeros(9, 4)
    ops.swap_blocks(source, target, torch.tensor(PAIRS), path=any_path)


def test_views_of_the_same_blocks(device, any_path) -> None:
    """As a latent cache gives its keys and values."""
    key = torch.arange(9 * 6.0, device=device).view(9, 6)
    want = copy_blocks_oracle(key.cpu(), key.cpu(), CHAIN)
    ops.copy_blocks([key, key[:, :4]], torch.tensor(CHAIN), path=any_path)
    assert torch.equal(key.cpu(), want)


def test_blocks_of_one_element(device, any_path) -> None:
    cache = torch.arange(9.0, device=device)
    want = copy_blocks_oracle(cache.cpu(), cache.cpu(), MIXED)
    ops.copy_blocks([cache], torch.tensor(MIXED), path=any_path)
    assert torch.equal(cache.cpu(), want)


def test_a_stream_of_another_device_is_refused() -> None:
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(InvalidInputError, match="stream must be of cpu"):
        ops.swap_blocks(torch.zeros(9, 4), torch.zeros(9, 4), torch.tensor(PAIRS), stream=stream)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["out", "in"])
def test_pageable_host_memory_without_the_extension_goes_to_torch(device, monkeypatch, way) -> None:
    monkeypatch.setattr(op_registry, "_cuda_ready", lambda device: False)
    host, on_device = torch.randn(9, 4, 6), torch.randn(9, 4, 6, device=device)
    source, target = (on_device, host) if way == "out" else (host, on_device)
    want = copy_blocks_oracle(source.cpu(), target.cpu(), PAIRS)
    ops.swap_blocks(source, target, torch.tensor(PAIRS))
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), want)
