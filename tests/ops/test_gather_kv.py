from __future__ import annotations

import pytest
import torch

from pagedattn import PagedKVCache, ops
from pagedattn.errors import InvalidInputError
from pagedattn.formats.registry import FORMATS
from pagedattn.testing.op_oracles import gather_kv_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [None, [0, 3, 17]])
@pytest.mark.parametrize(("layout", "dim"), [("NHD", 24), ("HND", 24), ("NHD", 7), ("HND", 128)])
def test_gather(device, any_path, dtype, starts, layout, dim) -> None:
    cache = torch.randn(12, 2, 4, dim) if layout == "HND" else torch.randn(12, 4, 2, dim)
    cache = (cache.transpose(1, 2) if layout == "HND" else cache).to(dtype)
    table = torch.randint(0, 12, (3, 9), dtype=torch.int32)
    table[2, -1] = 99
    table[0, 0] = -5
    lens = [5, 0, 21]
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    on_device = cache.to(device)
    key, value = ops.gather_kv(
        on_device,
        on_device[..., :5],
        table.to(device),
        cu.to(device),
        29,
        starts=None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
        path=any_path,
    )
    want = gather_kv_oracle(cache, table.tolist(), lens, starts or [0, 0, 0], 29)
    assert torch.equal(as_bytes(key), as_bytes(want))
    assert value is not None and torch.equal(as_bytes(value), as_bytes(want[..., :5]))
    assert not as_bytes(key)[26:].any() and as_bytes(key)[:26].any()


def test_a_table_with_strides(device, any_path) -> None:
    """Of a table [columns, B] transposed, and of every second column of another."""
    cache = torch.randn(7, 4, 1, 8, device=device)
    wide = torch.tensor([[3, 99, 1, 99], [6, 99, 2, 99]], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 8, 13], dtype=torch.int32, device=device)
    want = torch.cat((cache[3], cache[1], cache[6], cache[2, :1]))
    for table in (wide[:, ::2], wide[:, ::2].t().contiguous().t()):
        key, _ = ops.gather_kv(cache, None, table, cu, 13, path=any_path)
        assert torch.equal(key, want)


def test_fewer_rows_than_lengths_and_many_sequences(device, any_path) -> None:
    count = 70
    cache, table = torch.randn(count, 2, 1, 16, device=device), torch.randperm(count).int().view(count, 1).to(device)
    cu = torch.arange(0, 2 * count + 1, 2, dtype=torch.int32, device=device)
    key, _ = ops.gather_kv(cache, None, table, cu, 2 * count - 3, path=any_path)
    assert torch.equal(key, cache[table[:, 0].long()].flatten(0, 1)[:-3])


def test_without_values(device, any_path) -> None:
    cache, table = torch.randn(3, 4, 1, 8, device=device), torch.tensor([[2]], dtype=torch.int32, device=device)
    lens = torch.tensor([0, 3], dtype=torch.int32, device=device)
    key, value = ops.gather_kv(cache, None, table, lens, 3, path=any_path)
    assert value is None and torch.equal(key, cache[2, :3])


@pytest.mark.parametrize("sequences", [0, 1])
def test_nothing_to_gather_is_zeros(device, any_path, sequences) -> None:
    cache, table = torch.randn(3, 4, 1, 8, device=device), torch.zeros(sequences, 1, dtype=torch.int32, device=device)
    lens = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
    key, _ = ops.gather_kv(cache, None, table, lens, 3, path=any_path)
    assert key.shape == (3, 1, 8) and not key.any()
    assert ops.gather_kv(cache, None, table, lens, 0, path=any_path)[0].shape == (0, 1, 8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_table": torch.zeros(1, 1, dtype=torch.int64)}, "block_table must be int32"),
        ({"cu_lens": torch.zeros(3, dtype=torch.int32)}, "cu_lens must be int32"),
        ({"cu_lens": torch.zeros(2, 1, dtype=torch.int32)}, "cu_lens must be int32"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts must be int32"),
        ({"starts": torch.zeros(1, 1, dtype=torch.int32)}, "starts must be int32"),
        ({"value_cache": torch.zeros(3, 4, 8)}, "value_cache must be as key_cache"),
    ],
)
def test_what_does_not_fit_is_refused(change, match) -> None:
    good = {
        "key_cache": torch.zeros(3, 4, 1, 8),
        "value_cache": None,
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "cu_lens": torch.zeros(2, dtype=torch.int32),
        "num_tokens": 3,
    }
    with pytest.raises(InvalidInputError, match=match):
        ops.gather_kv(**{**good, **change})


@pytest.mark.parametrize("shape", [(0, 4, 1, 8), (3, 0, 1, 8), (3, 4, 0, 8), (3, 4, 1, 0)])
def test_a_cache_without_elements_gives_zeros(device, any_path, shape) -> None:
    cache, table = torch.randn(shape, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    key, _ = ops.gather_kv(cache, None, table, lens, 3, path=any_path)
    assert key.shape == (3, *shape[2:]) and not key.any()
    if any_path == "csrc":  # which does not rely on its caller
        out = torch.ones(3, *shape[2:], device=device)
        torch.ops.pagedattn_csrc.gather_kv(cache, table, lens, None, out)
        assert not out.any()


@pytest.mark.parametrize("far", ["slot", "head"])
def test_strides_beyond_2_to_the_31_elements(device, any_path, far) -> None:
    """Three slots or heads 2^30 elements apart; only the pages that hold them are ever touched."""
    stride = 1 << 30
    strides = (0, stride, 16, 1) if far == "slot" else (0, 16, stride, 1)
    shape = (1, 3, 1, 16) if far == "slot" else (1, 1, 3, 16)
    whole = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)
    cache = whole.as_strided(shape, strides)
    rows = torch.randn(1, 3, 16, device=device).half().view(shape)
    cache.copy_(rows)
    table, lens = (torch.tensor(data, dtype=torch.int32, device=device) for data in ([[0]], [0, shape[1]]))
    key, _ = ops.gather_kv(cache, None, table, lens, shape[1], path=any_path)
    assert torch.equal(key, rows[0])


@pytest.mark.parametrize("name", ["value_cache", "block_table", "cu_lens", "starts"])
def test_tensors_of_another_device_are_refused(name) -> None:
    good = {
        "key_cache": torch.zeros(3, 4, 1, 8),
        "value_cache": torch.zeros(3, 4, 1, 8),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "cu_lens": torch.zeros(2, dtype=torch.int32),
        "starts": torch.zeros(1, dtype=torch.int32),
        "num_tokens": 3,
    }
    with pytest.raises(InvalidInputError, match=f"{name} must be on cpu as key_cache"):
        ops.gather_kv(**{**good, name: good[name].to("meta")})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_what_their_format_decodes(device, any_path, name: str, dtype: torch.dtype) -> None:
    """Heads of 40 and 24, also in an odd block; of fp8 times scales of each head."""
    form, size, dims = FORMATS[name], 32, (40, 24)
    options = {"head_dim_v": dims[1], "kv_cache_dtype": name, "recent_blocks": 1 if form.whole_blocks else None}
    cache = PagedKVCache(1, 5, size, 2, dims[0], dtype=torch.float32, device=device, **options).layer(0)
    sides = (form.key, cache.key, cache.key_scale, dims[0]), (form.value, cache.value, cache.value_scale, dims[1])
    scales = torch.tensor([0.5, 3.0], device=device) if form.takes_scales else None
    table = torch.tensor([[3, 0], [4, 99]], dtype=torch.int32, device=device)
    cu, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 40, 45], [7, 0]))
    want = []
    for rows, codes, second, dim in sides:
        blocks = torch.randn(5, size, 2, dim, generator=torch.Generator().manual_seed(dim)).to(device)
        encoded = rows.encode(blocks, scales)
        for plane, stored in zip((codes, second), encoded, strict=False):
            assert plane is not None
            plane.copy_(stored)
        decoded = rows.decode(encoded, dim, torch.float32) * (1 if scales is None else scales[:, None])
        packed = torch.cat((decoded[3, 7:], decoded[0, :15], decoded[4, :5])).to(dtype)
        want.append(torch.cat((packed, packed.new_zeros(3, 2, dim))))
    given = {"k_scale": scales, "v_scale": scales, "dtype": dtype, "head_dims": dims, **cache.stored}
    got = ops.gather_kv(cache.key, cache.value, table, cu, 48, starts=starts, path=any_path, **given)
    for rows, exact in zip(got, want, strict=True):
        assert rows is not None and rows.dtype == dtype and torch.equal(rows, exact)


def test_what_cannot_be_decoded_is_refused(device) -> None:
    cache = PagedKVCache(1, 3, 16, 2, 40, kv_cache_dtype="k8v4", device=device).layer(0)
    table, cu = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1, 1), (2,)))

    def refused(message: str, **given) -> None:
        options = {"dtype": torch.float32, "head_dims": (40, 40), **cache.stored, **given}
        with pytest.raises(InvalidInputError, match=message):
            ops.gather_kv(cache.key, cache.value, table, cu, 1, **options)

    refused(r"value_cache must be .* as 'rotated_int4' stores 20 elements, got .*head_dims=", head_dims=None)
    refused("key_cache must be torch.float32", kv_cache_dtype="auto")
    refused("k_scale_cache must be", k_scale_cache=None)
    refused("k_scale, v_scale must be given for fp8 caches only", k_scale=2.0)
