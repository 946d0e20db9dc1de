"""The int4 format: steps of each channel of a block, and blocks sealed bit by bit by torch and by Triton."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from format_rows import device_of, normal

from pagedattn import AttentionSpec, Mask, PagedKVCache, ops
from pagedattn.backends.triton.metadata import shape_of_spec
from pagedattn.errors import InvalidInputError
from pagedattn.formats.int4.format import INT4, LARGEST, STEPS
from pagedattn.formats.k8v4.format import K8V4
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill.plan import AttentionConfig, attention_config
from pagedattn.kernels.shape import BatchBounds, shape_of
from pagedattn.ops.attention_plan import plan_attention
from pagedattn.runtime.target import Target

SIZE = 32


def error(rows: torch.Tensor, form: Any = INT4.key) -> float:
    """Squared, of what comes back, over the rows' squares."""
    back = form.decode(form.encode(rows), rows.shape[-1], torch.float64)
    return float((back - rows).square().sum() / rows.double().square().sum())


def test_normal_blocks_have_the_error_of_their_range() -> None:
    """A channel of 32 normal elements is 4.1 wide, so that the error of 15 steps is (4.1 / 15)**2 / 12, or 0.62 %."""
    assert 0.0059 < error(normal(500, SIZE, 2, 64)) < 0.0064
    assert 0.0096 < error(normal(500, 128, 1, 64)) < 0.0103, "more tokens, wider channels"


def test_channels_of_other_means_and_sizes_cost_nothing() -> None:
    rows, means = normal(50, SIZE, 2, 64), 30 * normal(64, seed=1)
    far = rows * (10.0 ** torch.linspace(-2, 1, 64)) + means
    of_rows = K8V4.value.decode(K8V4.value.encode(far), 64, torch.float64)
    back = INT4.key.decode(INT4.key.encode(far), 64, torch.float64)
    # Steps are no finer than a quarter of bfloat16's around the mean.
    spread = (far.double().var(1, keepdim=True) + (means.double() * 2**-8) ** 2).sqrt()
    assert float(((back - far) / spread).square().mean()) < 0.008 < float(((of_rows - far) / spread).square().mean())


@pytest.mark.parametrize("mean", [0.0, 3.0, -40.0, 1e4])
def test_float16_has_each_number_that_codes_stand_for(mean: float) -> None:
    """So that a kernel that multiplies with keys as float16 rounds none; at the ends of the range too."""
    rows = normal(400, SIZE, 1, 64) * (10.0 ** torch.linspace(-7, 4.5, 64)) + mean
    edges = torch.tensor(
        [[2032.9, -2047.9], [2047.9, -2047.9], [2033.1, 1.0], [-65504.0, 65504.0], [6e-8, -6e-8], [1e-9, 0]]
    )
    rows[:, 0, 0, :6], rows[:, 1:, 0, :6] = edges[:, 0], edges[:, 1]
    step, least = INT4.key.encode(rows)[1].double().split(64, -1)
    numbers = least + torch.arange(STEPS + 1.0, dtype=torch.float64)[:, None] * step
    assert torch.equal(numbers.half().double(), numbers) and bool(numbers.isfinite().all())


@pytest.mark.parametrize("width", [0.0, 1.0, 3.0, 20.0, 100.0, 400.0])
def test_narrow_channels_far_from_zero_keep_their_elements(width: float) -> None:
    """Of width / 15 to the nearest unit, four units would be 67 or 133 % of what is right: rather the next above."""
    rows = torch.full((1, SIZE, 1, 1), 1100.0)  # the unit is 1
    rows[0, :, 0, 0] += torch.linspace(0, width, SIZE)
    step, least = INT4.key.encode(rows)[1].double().flatten().tolist()
    assert step == {0.0: 0, 1.0: 1, 3.0: 1, 20.0: 2, 100.0: 7, 400.0: 27}[width]
    assert abs(least + step * STEPS / 2 - (1100 + width / 2)) <= 0.5


def test_codes_are_the_nearest_of_fifteen_steps_from_the_least() -> None:
    rows = normal(9, SIZE, 2, 24) * 5 + 40
    packed, channels = INT4.key.encode(rows)
    step, least = channels.double().split(24, -1)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    assert int(codes.min()) == 0 and int(codes.max()) == STEPS
    nearest = ((rows.double() - least) / step).round().clamp(0, STEPS)
    assert torch.equal(codes.double(), nearest)
    low, high = rows.amin(1, True).double(), rows.amax(1, True).double()
    unit = 2.0 ** (high.maximum(-low).log2().floor() - 9)
    assert bool(((step - (high - low) / STEPS).abs() <= unit / 2).all())
    assert bool(((least + step * STEPS / 2 - (low + high) / 2).abs() <= unit / 2).all())


def test_blocks_that_are_constant_huge_or_not_finite() -> None:
    rows = normal(1, SIZE, 3, 8)
    rows[..., 0], rows[..., 1], rows[..., 2] = 3.5, 0.0, rows[..., 2] * 1e6
    rows[0, 5, 0, 3], rows[0, 9, 1, 4], rows[0, 9, 2, 4] = math.nan, math.inf, -math.inf
    back = INT4.key.decode(INT4.key.encode(rows), 8, torch.float64)
    assert (back[..., 0] == 3.5).all() and not back[..., 1].any()
    assert back[..., 2].abs().max() <= 16 * LARGEST
    spoiled = torch.zeros(1, SIZE, 3, 8, dtype=torch.bool)
    spoiled[:, :, 0, 3] = spoiled[:, :, 1, 4] = spoiled[:, :, 2, 4] = True
    assert torch.equal(back.isnan(), spoiled)


def case(
    size: int, dim: int, value_dim: int, heads: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, PagedKVCache]:
    """Rows of a second cache with what is hard to store, and an empty cache."""
    key, value = normal(6, size, heads, dim), normal(6, size, heads, value_dim, seed=1)
    key[..., 0] += 100
    key[:, :, 0, dim // 2] = 3.5
    key[1, 3, 0, 1], key[2, 5, 0, 2], value[1, 2, 0, 0] = math.nan, math.inf, math.nan
    key[3, :, 0, 3], key[4, :, 0, 4], value[2, 0] = key[3, :, 0, 3] * 1e7, key[4, :, 0, 4] * 1e-9, value[2, 0] * 1e30
    key[1, :, :, 5] = -0.0
    key[1, ::2, :, 5] = 0.0
    options: dict[str, Any] = {"head_dim_v": value_dim, "kv_cache_dtype": "int4", "recent_blocks": 1, "device": device}
    cache = PagedKVCache(1, 7, size, heads, dim, **options)
    cache.slabs.fill_(0x3A)
    return key.to(device), value.to(device), cache


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize(
    ("size", "dim", "value_dim", "heads"), [(32, 128, 128, 2), (96, 12, 40, 3), (64, 7, 1, 1), (1024, 16, 8, 1)]
)
def test_a_step_seals_the_blocks_that_it_fills(path: str, size: int, dim: int, value_dim: int, heads: int) -> None:
    device = device_of(path)
    key, value, cache = case(size, dim, value_dim, heads, device)
    layer, before = cache.layer(0), cache.slabs.clone()
    query_lens, seq_lens = [2 * size + 5, size, 3, 0, 4], [4 * size - 1, 2 * size, 3 * size - 1, 5 * size, 3]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    # Sequence 0 fills its blocks 1 and 2, sequence 1 its block 1; others none: entries beside those are not followed.
    recent_table = torch.tensor([[9, 3, 1, 2], [0, 4, -1, 9], [4, 4, 4, 4], [4, 4, 4, 4], [4, 4, 4, 4]])
    table = torch.tensor([[-1, 1, 2, 6], [3, 4, 5, 9], [0, 0, 0, 0], [5, 5, 5, 5], [6, 6, 6, 6]])
    recent_table, table, starts, lens = (
        torch.as_tensor(x).int().to(device) for x in (recent_table, table, starts, seq_lens)
    )
    planes = {"k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale}
    options: dict[str, Any] = {"max_query_len": max(query_lens), "kv_cache_dtype": "int4", "path": path, **planes}
    lengths = (starts, lens)
    ops.seal_blocks(key, value, recent_table, layer.key, layer.value, table, *lengths, **options)
    sources, targets, others = [3, 1, 4], [1, 2, 4], [0, 3, 5, 6]
    assert torch.equal(cache.slabs[0, others], before[0, others])
    sides = ((INT4.key, key, layer.key, layer.key_scale), (INT4.value, value, layer.value, layer.value_scale))
    for form, rows, codes, scales in sides:
        assert scales is not None
        wanted_codes, wanted_scales = form.encode(rows[sources])
        assert torch.equal(codes[targets], wanted_codes)
        stored, spoiled = scales[targets], wanted_scales.isnan()  # NaNs of a GPU have other bits
        assert torch.equal(stored.isnan(), spoiled)
        stored, wanted = (x.masked_fill(spoiled, 0.0).view(torch.uint8) for x in (stored, wanted_scales.contiguous()))
        assert torch.equal(stored, wanted)
    again = cache.slabs.clone()
    ops.seal_blocks(key, value, recent_table, layer.key, layer.value, table, *lengths, **options)
    assert torch.equal(cache.slabs, again)


@pytest.mark.parametrize(("seqs", "programs"), [(4, 1), (4, 3), (32, 5)])
def test_programs_find_blocks_among_many_sequences(seqs: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than a program reads at once, and more blocks than programs."""
    from pagedattn.kernels.cache_write import block_kernel

    monkeypatch.setattr(block_kernel, "_SEQS", seqs)
    monkeypatch.setattr(block_kernel, "_PROGRAMS", 2 * block_kernel._PARTS * programs)
    device, random = device_of("triton"), torch.Generator().manual_seed(programs)
    new = torch.tensor([1, 40, 0, 1, 33, 1, 70, 31, 1, 1, 64])
    lens = torch.tensor([32, 40, 64, 64, 65, 63, 96, 31, 33, 96, 64])
    key, value = (torch.randn(40, 32, 1, 8, generator=random).to(device) for _ in range(2))
    blocks = torch.randperm(40, generator=random)[: 3 * len(new)].view(-1, 3)
    tables = blocks.int().to(device), blocks.flip(0).int().to(device)
    lengths = torch.cat((new.new_zeros(1), new.cumsum(0))).int().to(device), lens.int().to(device)
    stored = []
    for path in ("torch", "triton"):
        cache = PagedKVCache(1, 40, 32, 1, 8, kv_cache_dtype="int4", recent_blocks=1, device=device)
        layer = cache.layer(0)
        planes = {"k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale}
        options: dict[str, Any] = {"max_query_len": 70, "kv_cache_dtype": "int4", "path": path, **planes}
        ops.seal_blocks(key, value, tables[0], layer.key, layer.value, tables[1], *lengths, **options)
        stored.append(cache.slabs)
    assert torch.equal(*stored)
    assert len(stored[0].flatten(2).any(-1).nonzero()) == int((lens // 32 - (lens - new) // 32).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tiles_of_keys_are_of_one_block(dtype: torch.dtype) -> None:
    """Whose steps are loaded once for the tile."""
    spec = AttentionSpec(num_heads=8, head_dim=128, num_kv_heads=2, dtype=dtype, kv_cache_dtype="int4")
    cache = PagedKVCache(1, 200, 32, 2, 128, dtype=dtype, kv_cache_dtype="int4", recent_blocks=1).layer(0)
    query, lens = torch.zeros(4, 8, 128, dtype=dtype), torch.tensor([3000, 6000]).int()
    tables = (torch.zeros(2, 200, dtype=torch.int32), torch.tensor([0, 2, 4]).int(), lens)
    rest = (None, None, None, None, query, None, 1.0, 1.0, Mask(True, earlier_blocks=32).constants, 0.0, 2, 6000, 0)
    planes = (cache.key_scale, cache.value_scale, "int4")
    inputs = AttentionInputs(query, cache.key, cache.value, *tables, *rest, False, *planes)
    assert shape_of(inputs)._replace(mask=(1, 0)) == shape_of_spec(spec)._replace(mask=(1, 0))
    for tokens, seqs in ((1, 1), (1, 64), (1, 1000), (4, 64), (2000, 1), (2000, 8)):
        bounds = BatchBounds(tokens * seqs, seqs, 0, tokens, 6000)
        for shape in (shape_of(inputs), shape_of_spec(spec)):
            for launch in plan_attention(shape, bounds, torch.device("cpu")).launches:
                config = launch.config
                tile = config.block_n if isinstance(config, AttentionConfig) else config.tuning.block_n  # type: ignore[union-attr]
                assert 32 % tile == 0
    heads = {"group": 4, "head_dim": 128, "head_dim_v": 128, "itemsize": 2, "target": Target(132, 232448)}
    assert attention_config(**heads, tile_keys=16).block_n == 16 < attention_config(**heads).block_n


def test_float16_keys_at_the_end_of_their_range_stay_finite() -> None:
    rows = torch.full((1, SIZE, 1, 4), 65504.0, dtype=torch.float16)
    rows[:, ::2, :, 0] *= -1
    rows[:, ::2, :, 1] = 0.0
    rows[:, ::2, :, 2] = 60000.0
    packed, channels = INT4.key.encode(rows)
    back = INT4.key.decode((packed, channels), 4, torch.float16)
    assert bool(back.isfinite().all()) and float(channels[..., :4].max()) == 8704.0, "queries are scaled for that"
    assert bool(((back.float() - rows.float()).abs() <= 65504 / 15 + 64).all()), "half a step of the widest channel"


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_blocks_outside_a_cache_are_skipped(path: str) -> None:
    device = device_of(path)
    key, value, cache = case(SIZE, 16, 16, 1, device)
    layer, before = cache.layer(0), cache.slabs.clone()
    table = torch.tensor([[1, 2]]).int().to(device)
    outside = [torch.tensor([ids]).int().to(device) for ids in ([-1, 7], [2**31 - 1, -(2**31)])]
    planes = {"k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale}
    options: dict[str, Any] = {"max_query_len": 2 * SIZE, "kv_cache_dtype": "int4", "path": path, **planes}
    lengths = (torch.tensor([0, 2 * SIZE]).int().to(device), torch.tensor([2 * SIZE]).int().to(device))
    for ids in outside:
        ops.seal_blocks(key, value, ids, layer.key, layer.value, table, *lengths, **options)
        ops.seal_blocks(key, value, table, layer.key, layer.value, ids, *lengths, **options)
    narrow = table[:, :1]  # a sequence longer than its table
    ops.seal_blocks(key, value, narrow, layer.key, layer.value, table + 2, *lengths, **options)
    assert torch.equal(cache.slabs[0, [0, 1, 2, 4, 5, 6]], before[0, [0, 1, 2, 4, 5, 6]])
    assert not torch.equal(cache.slabs[0, 3], before[0, 3])


def test_what_a_block_takes() -> None:
    cache = PagedKVCache(2, 3, 64, 4, 128, kv_cache_dtype="int4", recent_blocks=2, dtype=torch.bfloat16)
    assert cache.bytes_per_block == 64 * 4 * (64 + 64 + 4) + 4 * 2 * 128 * 2
    assert cache.recent is not None and cache.recent.bytes_per_block == 64 * 4 * 128 * 2 * 2
    assert cache.nbytes == 2 * (3 * cache.bytes_per_block + 2 * cache.recent.bytes_per_block)
    mixed = PagedKVCache(3, 3, 32, 1, 16, kv_cache_dtype="int4:skip=1", recent_blocks=2)
    recents = [mixed.layer(index).recent for index in range(3)]
    assert recents[1] is None and mixed.recent is not None and mixed.recent.num_layers == 2
    assert recents[0] is mixed.recent.layer(0) and recents[2] is mixed.recent.layer(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be a format that encodes whole blocks, as int4, got 'int8'"),
        ({"k_scale_cache": None}, "k_scale_cache must be torch.float16 .*, got None"),
        ({"seq_lens": torch.tensor([32])}, r"seq_lens must be int32 \[1\] on cpu"),
        ({"recent_table": torch.tensor([[1], [2]]).int()}, r"recent_table must be int32 \[1, max_blocks\]"),
        ({"value": torch.zeros(2, 16, 1, 8)}, "value_cache must be torch.uint8"),
        ({"key": torch.zeros(2, 32, 2, 16)}, "key_cache must be torch.uint8"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    layer = PagedKVCache(1, 3, 32, 1, 16, head_dim_v=8, kv_cache_dtype="int4", recent_blocks=2).layer(0)
    assert layer.recent is not None
    given: dict[str, Any] = {
        **{"key": layer.recent.key, "value": layer.recent.value, "recent_table": torch.tensor([[1]]).int()},
        **{"key_cache": layer.key, "value_cache": layer.value, "block_table": torch.tensor([[1]]).int()},
        **{"query_start_loc": torch.tensor([0, 3]).int(), "seq_lens": torch.tensor([32]).int()},
        **{"max_query_len": 3, "k_scale_cache": layer.key_scale, "v_scale_cache": layer.value_scale},
    }
    ops.seal_blocks(**given, kv_cache_dtype="int4")
    with pytest.raises(InvalidInputError, match=message):
        ops.seal_blocks(**{"kv_cache_dtype": "int4", **given, **changes})


def test_tokens_are_not_written_to_full_blocks() -> None:
    layer, rows = PagedKVCache(1, 3, 32, 1, 16, kv_cache_dtype="int4", recent_blocks=2).layer(0), torch.zeros(1, 1, 16)
    with pytest.raises(InvalidInputError, match="kv_cache_dtype must be a format that stores each token when it comes"):
        ops.reshape_and_cache(rows, rows, layer.key, layer.value, torch.tensor([40]), **layer.stored)
