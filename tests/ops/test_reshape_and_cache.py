from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from pagedattn import PagedKVCache, ops
from pagedattn.errors import InvalidInputError
from pagedattn.formats.registry import format_of
from pagedattn.testing.op_oracles import reshape_and_cache_oracle

SLOTS = [5, -1, 0, 23, 24, 2**40, -(2**63), 17]  # 24 slots: 24 and above are outside
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def make_cache(layout: str, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value caches [6, 4, heads, dim or dim_v]; `both` interleaves them in one [P, 2, S, H, D]."""
    if layout == "both":
        pair = torch.randn(6, 2, 4, heads, max(dim, dim_v)).to(dtype)
        return pair[:, 0, ..., :dim], pair[:, 1, ..., :dim_v]
    shapes = [(6, 4, heads, d) if layout == "NHD" else (6, heads, 4, d) for d in (dim, dim_v)]
    caches = [torch.randn(shape).to(dtype) for shape in shapes]
    keys, values = caches if layout == "NHD" else [cache.transpose(1, 2) for cache in caches]
    return keys, values


def fused_rows(count: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as slices of one projection."""
    fused = torch.randn(count, heads * (dim + dim_v)).to(dtype)
    key, value = fused.split([heads * dim, heads * dim_v], 1)
    return key.unflatten(1, (heads, dim)), value.unflatten(1, (heads, dim_v))


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device with the same strides: `to` makes a slice contiguous."""
    whole = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size())
    whole.untyped_storage().copy_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def equal_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bits, but that one NaN is as good as another."""
    nan = want.float().isnan()
    kind = BYTES[want.dtype.itemsize]
    got, got_nan = got.cpu().contiguous(), got.cpu().float().isnan()
    return torch.equal(nan, got_nan) and torch.equal(got.view(kind)[~nan], want.contiguous().view(kind)[~nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["NHD", "HND", "both"])
@pytest.mark.parametrize(
    ("heads", "dim", "dim_v"), [(2, 16, 16), (3, 24, 40), (1, 1, 7), (4, 72, 9), (5, 128, 512), (6, 128, 64)]
)
def test_writes_what_it_should_and_nothing_else(device, any_path, dtype, layout, heads, dim, dim_v) -> None:
    host = make_cache(layout, heads, dim, dim_v, dtype)
    rows = fused_rows(len(SLOTS) + 2, heads, dim, dim_v, dtype)  # two rows of padding
    wanted = [reshape_and_cache_oracle(one, cache, SLOTS) for one, cache in zip(rows, host, strict=True)]
    key, value, key_cache, value_cache = (moved(one, device) for one in (*rows, *host))
    ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor(SLOTS, device=device), path=any_path)
    assert equal_bits(key_cache, wanted[0]) and equal_bits(value_cache, wanted[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_interleaved_neighbours_are_untouched(device, any_path, layout) -> None:
    """Keys and values in one allocation with room between them: every byte that is not a row's stays."""
    pair = torch.zeros(6, 2, 4, 2, 40, device=device)
    keys, values = (pair[:, i, ..., 3:27] for i in range(2))
    if layout == "HND":
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    key, value = torch.randn(2, 2, 24, device=device), torch.randn(2, 2, 24, device=device)
    ops.reshape_and_cache(key, value, keys, values, torch.tensor([7, 20], device=device), path=any_path)
    assert int((keys != 0).sum()) == 96 and int((values != 0).sum()) == 96
    assert torch.equal(keys[1, 3], key[0]) and torch.equal(values[5, 0], value[1])
    assert not pair[..., :3].any() and not pair[..., 27:].any()


@pytest.mark.parametrize("count", [1, 3, 2049, 70001])
def test_any_number_of_tokens(device, any_path, count) -> None:
    """The largest has several tokens per thread in the extension's kernel, the last two in Triton's programs."""
    if any_path == "triton" and device.type == "cpu" and count > 2049:
        pytest.skip("the interpreter takes a minute for this")
    rows = torch.rand(count, 2, 16, device=device) + 1
    cache = torch.zeros(-(-count // 4) + 1, 4, 2, 16, device=device)
    slots = torch.randperm(len(cache) * 4, device=device)[:count]
    ops.reshape_and_cache(rows, -rows, cache, other := torch.zeros_like(cache), slots, path=any_path)
    assert torch.equal(cache.flatten(0, 1)[slots], rows) and torch.equal(other.flatten(0, 1)[slots], -rows)
    assert int((cache != 0).sum()) == rows.numel()


@pytest.fixture
def many(device, monkeypatch) -> int:
    """Tokens from which on a program of Triton's kernel takes several; where it is interpreted an eighth of them."""
    if device.type == "cuda":
        return 2048
    if find_spec("triton"):
        monkeypatch.setattr(import_module("pagedattn.kernels.cache_write.kernel"), "_MANY", 256)
    return 256


def test_many_tokens_whose_elements_are_no_power_of_two(device, any_path, many) -> None:
    """Keys of 192 and values of 128, as an expanded latent layer stores them."""
    count = many
    key, value = torch.randn(count, 16, 192, device=device), torch.randn(count, 16, 128, device=device)
    keys, values = torch.zeros(count, 1, 16, 192, device=device), torch.zeros(count, 1, 16, 128, device=device)
    slots = torch.randperm(count, device=device)
    ops.reshape_and_cache(key, value, keys, values, slots, path=any_path)
    assert torch.equal(keys[slots, 0], key) and torch.equal(values[slots, 0], value)


@pytest.mark.parametrize("form", ["fp8_e5m2", "int8", "k8v4", "turboquant_k3v4"])
def test_many_tokens_are_encoded_as_few_are(device, path, many, form) -> None:
    """Programs of many tokens; slots in the middle and at the end are outside the cache."""
    count, blocks = many + 3, many // 4 + 2
    torch.manual_seed(0)
    layer = PagedKVCache(1, blocks, 4, 3, 12, head_dim_v=20, device=device, kv_cache_dtype=form).layer(0)
    key, value = (torch.randn(count, 3, dim, device=device) for dim in (12, 20))
    slots = torch.randperm(4 * blocks, device=device)[:count]
    slots[[70, 71, -1]] = -1
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.rand(3, device=device) + 0.5) if form == "fp8_e5m2" else {}
    ops.reshape_and_cache(key, value, layer.key, layer.value, slots, path=path, **scales, **layer.stored)
    kept = slots >= 0
    given = format_of(form)
    for rows, kind, planes in zip((key, value), (given.key, given.value), layer.sides, strict=True):
        for plane, want in zip(planes, kind.encode(rows, scales.get("k_scale")), strict=True):
            assert equal_bits(plane.flatten(0, 1)[slots[kept]], want[kept].cpu())


def test_a_block_size_that_is_no_power_of_two(device, any_path) -> None:
    cache, rows = torch.zeros(5, 6, 1, 8, device=device), torch.randn(30, 1, 8, device=device)
    slots = torch.randperm(30, device=device)
    ops.reshape_and_cache(rows, None, cache, None, slots, path=any_path)
    assert torch.equal(cache.flatten(0, 1)[slots], rows)


def test_strided_slots_and_repeated_rows(device, any_path) -> None:
    cache, row = torch.zeros(6, 4, 2, 16, device=device), torch.randn(1, 2, 16, device=device)
    slots = torch.tensor([[3, 9], [5, 9], [23, 9]], device=device)[:, 0]
    ops.reshape_and_cache(row.expand(3, 2, 16), None, cache, None, slots, path=any_path)
    assert torch.equal(cache.flatten(0, 1)[slots], row.expand(3, 2, 16)) and int((cache != 0).sum()) == 96


def test_only_skipped_slots_change_nothing(device, any_path) -> None:
    cache = torch.randn(6, 4, 2, 16, device=device)
    before = cache.clone()
    rows = torch.full((3, 2, 16), torch.nan, device=device)
    ops.reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor([-1, 24, 99], device=device), path=any_path)
    assert torch.equal(cache, before)


def test_no_tokens(device, any_path) -> None:
    cache, none = torch.ones(6, 4, 2, 16, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    ops.reshape_and_cache(torch.zeros(4, 2, 16, device=device), None, cache, None, none, path=any_path)
    assert bool((cache == 1).all())


def test_values_may_be_a_view_of_keys(device, any_path) -> None:
    cache, rows = torch.randn(6, 4, 1, 24, device=device), torch.randn(2, 1, 24, device=device)
    ops.reshape_and_cache(rows, None, cache, None, torch.tensor([3, 4], device=device), path=any_path)
    assert torch.equal(cache[0, 3], rows[0]) and torch.equal(cache[1, 0], rows[1])


def test_beyond_2_to_the_31_elements(device, any_path) -> None:
    """Three blocks 2^30 elements apart; only the pages that hold them are ever touched."""
    far = 1 << 30
    cache = torch.empty(2 * far + 4096, dtype=torch.float16, device=device).as_strided((3, 4, 1, 16), (far, 16, 16, 1))
    cache[0] = 0
    rows = torch.randn(2, 1, 16, device=device).half()
    ops.reshape_and_cache(rows, None, cache, None, torch.tensor([11, 4], device=device), path=any_path)
    assert torch.equal(cache[2, 3], rows[0]) and torch.equal(cache[1, 0], rows[1]) and not cache[0].any()


@pytest.mark.parametrize(
    ("key", "slots", "match"),
    [
        (torch.zeros(2, 2, 15), torch.zeros(2, dtype=torch.int64), r"key must be float32 \[T, 2, 16\]"),
        (torch.zeros(2, 2, 16).half(), torch.zeros(2, dtype=torch.int64), "key must be float32"),
        (torch.zeros(1, 2, 16), torch.zeros(2, dtype=torch.int64), "at least 2 rows"),
        (torch.zeros(2, 2, 16), torch.zeros(2, dtype=torch.int32), "slot_mapping must be int64"),
        (torch.zeros(2, 2, 32)[..., ::2], torch.zeros(2, dtype=torch.int64), "last stride 1"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(key, slots, match) -> None:
    cache = torch.ones(6, 4, 2, 16)
    with pytest.raises(InvalidInputError, match=match):
        ops.reshape_and_cache(key, key, cache, cache, slots)
    assert bool((cache == 1).all())


def test_heads_beyond_2_to_the_31_elements(device, any_path) -> None:
    far = 1 << 30
    whole = torch.empty(2 * far + 64, dtype=torch.float16, device=device)
    rows, cache = (whole[i * 32 :].as_strided((1, 3, 16), (16, far, 1)) for i in range(2))
    rows.copy_(want := torch.randn(1, 3, 16, device=device).half())
    ops.reshape_and_cache(rows, None, cache[:, None], None, torch.tensor([0], device=device), path=any_path)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (3, 0, 2, 8), (3, 4, 0, 8), (3, 4, 2, 0)])
def test_caches_without_elements(device, any_path, shape) -> None:
    cache, slots = torch.zeros(shape, device=device), torch.tensor([1, 0], device=device)
    rows = torch.zeros(2, *shape[2:], device=device)
    ops.reshape_and_cache(rows, rows, cache, cache.clone(), slots, path=any_path)
    if shape[3] == 0:  # one side alone has none
        other, ones = torch.zeros(3, 4, 2, 8, device=device), torch.ones(2, 2, 8, device=device)
        for given in ((rows, ones, cache, other), (ones, rows, other, cache)):
            ops.reshape_and_cache(*given, slots, path=any_path)
            assert int(other.sum()) == 32
            other.zero_()


def test_a_cache_keeps_no_graph(device, any_path) -> None:
    cache, rows = torch.zeros(3, 4, 2, 8, device=device), torch.ones(2, 2, 8, device=device, requires_grad=True)
    slots = torch.tensor([1, 0], device=device)
    ops.reshape_and_cache(rows, rows * 2, cache, other := cache.clone(), slots, path=any_path)
    assert not cache.requires_grad and not other.requires_grad and int(cache.sum()) == 32
