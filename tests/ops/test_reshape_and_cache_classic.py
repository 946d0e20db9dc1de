from __future__ import annotations

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.runtime import op_registry
from pagedattn.testing.op_oracles import reshape_and_cache_classic_oracle

SLOTS = [5, -1, 0, 23, 24, 2**40, -(2**63), 17]


def make(dtype: torch.dtype, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = 16 // dtype.itemsize
    return torch.randn(6, heads, dim // x, 4, x).to(dtype), torch.randn(6, heads, dim, 4).to(dtype)


@pytest.fixture(params=["csrc", "torch"])
def path(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "csrc" and op_registry.path_of("reshape_and_cache_classic", device) != "csrc":
        pytest.skip(f"the extension has nothing for {device}: {op_registry.csrc_status()}")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 40), (1, 128)])
def test_writes_what_it_should_and_nothing_else(device, path, dtype, heads, dim) -> None:
    caches = make(dtype, heads, dim)
    fused = torch.randn(len(SLOTS) + 2, heads, 2 * dim).to(dtype)
    want = reshape_and_cache_classic_oracle(fused[..., :dim], fused[..., dim:], *caches, SLOTS)
    key_cache, value_cache = (cache.to(device) for cache in caches)
    rows, slots = fused.to(device), torch.tensor(SLOTS, device=device)
    ops.reshape_and_cache_classic(rows[..., :dim], rows[..., dim:], key_cache, value_cache, slots, path=path)
    assert torch.equal(key_cache.cpu(), want[0]) and torch.equal(value_cache.cpu(), want[1])


def test_no_tokens_and_only_skipped_ones(device, path) -> None:
    key_cache, value_cache = (cache.to(device) for cache in make(torch.float32, 2, 16))
    before = key_cache.clone(), value_cache.clone()
    rows = torch.full((3, 2, 16), torch.nan, device=device)
    for slots in ([], [-1, 24, 99]):
        listed = torch.tensor(slots, dtype=torch.int64, device=device)
        ops.reshape_and_cache_classic(rows, rows, key_cache, value_cache, listed, path=path)
    assert torch.equal(key_cache, before[0]) and torch.equal(value_cache, before[1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"key_cache": torch.zeros(6, 2, 2, 4, 8)}, "key_cache must be"),
        ({"value_cache": torch.zeros(6, 2, 4, 16).transpose(2, 3)}, "value_cache must be"),
        ({"key": torch.zeros(2, 2, 16).half()}, "must be"),
        ({"value": torch.zeros(1, 2, 16)}, "value must be"),
    ],
)
def test_bad_input_is_refused(change, match) -> None:
    key_cache, value_cache = make(torch.float32, 2, 16)
    rows = torch.zeros(2, 2, 16)
    good = {"key": rows, "value": rows, "key_cache": key_cache, "value_cache": value_cache}
    with pytest.raises(InvalidInputError, match=match):
        ops.reshape_and_cache_classic(**{**good, **change}, slot_mapping=torch.tensor([0, 1]))


def test_there_is_no_triton_path() -> None:
    rows = torch.zeros(1, 2, 16)
    with pytest.raises(UnsupportedError, match="use one of auto, csrc, torch"):
        ops.reshape_and_cache_classic(rows, rows, *make(torch.float32, 2, 16), torch.tensor([0]), path="triton")


@pytest.mark.parametrize("shape", [(0, 2, 16, 4), (3, 2, 16, 0), (3, 0, 16, 4), (3, 2, 0, 4)])
def test_caches_without_elements(path, shape) -> None:
    blocks, heads, dim, size = shape
    rows = torch.ones(1, heads, dim)
    cache = torch.zeros(blocks, heads, dim // 4, size, 4)
    ops.reshape_and_cache_classic(rows, rows, cache, torch.zeros(shape), torch.tensor([0]), path=path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("strided", [False, True])
def test_what_was_written_is_read_back(device, path, dtype, strided) -> None:
    rows = torch.randn(2, 22, 3, 48, device=device).mul(50).to(dtype)
    kind, x = {"dtype": dtype, "device": device}, 16 // dtype.itemsize
    key_cache = torch.zeros(6, 3, 48 // x, 4, x, **kind)
    value_cache = torch.zeros(6, 3, 48, 4, **kind)
    slots = torch.randperm(24, device=device)[:22]
    ops.reshape_and_cache_classic(rows[0], rows[1], key_cache, value_cache, slots, path=path)
    if strided:  # a layer's slice of a tensor of all layers
        key_cache, value_cache = (torch.stack((cache, cache), 2)[:, :, 0] for cache in (key_cache, value_cache))
    for got, want in zip(ops.from_classic_layout(key_cache, value_cache), rows, strict=True):
        assert got.shape == (6, 4, 3, 48) and got.dtype == dtype and got.is_contiguous()
        assert torch.equal(got.flatten(0, 1).view(torch.uint8)[slots], want.view(torch.uint8))


def test_blocks_of_a_sequence_are_read_in_its_order(device) -> None:
    key_cache, value_cache = (cache.to(device) for cache in make(torch.float32, 2, 16))
    value_cache = value_cache[:, :, :12]  # head_dim_v is its own
    table, lens = torch.tensor([[4, 0, 5]], dtype=torch.int32, device=device), torch.tensor([0, 10], device=device)
    chosen = ops.from_classic_layout(key_cache, value_cache, table[0])
    everything = ops.from_classic_layout(key_cache, value_cache)
    gathered = ops.gather_kv(everything[0], everything[1], table, lens.int(), 10)
    for got, want in zip(chosen, gathered, strict=True):
        assert want is not None and torch.equal(got.flatten(0, 1)[:10], want)
    assert chosen[0][1, 2, 1, 7] == key_cache[0, 1, 1, 2, 3] and chosen[1][2, 3, 0, 11] == value_cache[5, 0, 11, 3]


def test_caches_that_are_not_classic_are_refused() -> None:
    key_cache, value_cache = make(torch.float32, 2, 16)
    for change, match in {
        (value_cache, value_cache): "key_cache must be",
        (key_cache, value_cache[:5]): "value_cache must be",
        (key_cache, value_cache[..., :3]): "value_cache must be",
        (key_cache, value_cache, torch.zeros(2)): "blocks must be",
        (key_cache, value_cache, torch.zeros(1, 2, dtype=torch.int32)): "blocks must be",
    }.items():
        with pytest.raises(InvalidInputError, match=match):
            ops.from_classic_layout(*change)
