"""PagedKVCache: every view lies where it should, alone; blocks are copied and zeroed in all layers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from pagedattn import LayerCache, PagedKVCache, ops
from pagedattn.cache.specs import FullAttentionSpec, KVCacheSpec, MLASpec, SlidingWindowSpec
from pagedattn.errors import CapacityError, InvalidInputError

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "num_blocks": 5,
    "block_size": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "head_dim_v": 10,
}
KINDS: list[dict[str, Any]] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "int8"},
]
LAYOUTS_AND_KINDS = list(product(("NHD", "HND"), KINDS))


def views(cache: LayerCache) -> list[torch.Tensor]:
    every = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return [view for view in every if view is not None]


def bytes_of(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Offsets into `base` of the first byte of each element, in the view's logical shape."""
    offset = torch.full(view.shape, view.data_ptr() - base.data_ptr())
    for dim, stride in enumerate(view.stride()):
        steps = torch.arange(view.shape[dim]) * stride * view.itemsize
        offset += steps.view([-1 if d == dim else 1 for d in range(view.dim())])
    return offset


def covered(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return (bytes_of(view, base)[..., None] + torch.arange(view.itemsize)).flatten()


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS_AND_KINDS)
def test_views_share_out_the_allocation_and_never_overlap(layout: str, kind: dict[str, Any]) -> None:
    cache = PagedKVCache(**SHAPE, layout=layout, **kind)
    every = [covered(view, cache.slabs) for index in range(3) for view in views(cache.layer(index))]
    offsets = torch.cat(every)
    assert len(offsets) == len(offsets.unique()) == cache.nbytes
    assert int(offsets.min()) == 0 and int(offsets.max()) == cache.nbytes - 1


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS_AND_KINDS)
def test_a_block_of_a_layer_is_contiguous(layout: str, kind: dict[str, Any]) -> None:
    cache = PagedKVCache(**SHAPE, layout=layout, **kind)
    for index, block in product(range(3), range(5)):
        parts = [covered(view[block : block + 1], cache.slabs) for view in views(cache.layer(index))]
        offsets = torch.cat(parts).sort().values
        first = (index * 5 + block) * cache.bytes_per_block
        assert torch.equal(offsets, torch.arange(first, first + cache.bytes_per_block))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_written_through_one_view_is_read_through_it(layout: str) -> None:
    cache = PagedKVCache(**SHAPE, layout=layout)
    every = [view for index in range(3) for view in views(cache.layer(index))]
    assert len(every) == 6 and not any(view.any() for view in every)
    start, written = 1, []
    for view in every:
        written.append(torch.arange(start, start + view.numel(), dtype=torch.float32).view(view.shape))
        view.copy_(written[-1])
        start += view.numel()
    assert all(torch.equal(view, want) for view, want in zip(every, written, strict=True))


def test_strides_say_the_layout() -> None:
    nhd, hnd = (PagedKVCache(**SHAPE, layout=layout).layer(0) for layout in ("NHD", "HND"))
    block = 4 * 2 * (6 + 10)
    assert nhd.key.shape == hnd.key.shape == (5, 4, 2, 6)
    assert nhd.value.shape == hnd.value.shape == (5, 4, 2, 10)
    assert nhd.key.stride() == (block, 2 * 6, 6, 1)
    assert nhd.value.stride() == (block, 2 * 10, 10, 1)
    assert hnd.key.stride() == (block, 6, 4 * 6, 1)
    assert hnd.value.stride() == (block, 10, 4 * 10, 1)
    assert (nhd.num_blocks, nhd.block_size) == (5, 4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "k8v4", "turboquant4:window=0"])
def test_scales_of_a_head_lie_one_after_the_other(layout: str, kv_cache_dtype: str) -> None:
    """Whatever the layout of codes, so that kernels read those of several keys as a vector."""
    layer = PagedKVCache(2, 5, 16, 3, 64, layout=layout, kv_cache_dtype=kv_cache_dtype).layer(1)
    for plane in (layer.key_scale, layer.value_scale):
        assert plane is not None and plane.shape == (5, 16, 3, 1)
        assert plane.stride()[1:3] == (1, 16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_int8_has_a_float32_scale_per_token_and_head(layout: str) -> None:
    layer = PagedKVCache(**SHAPE, kv_cache_dtype="int8", layout=layout).layer(2)
    assert layer.key.dtype == layer.value.dtype == torch.int8
    assert layer.key_scale is not None and layer.value_scale is not None
    for scale in (layer.key_scale, layer.value_scale):
        assert scale.shape == (5, 4, 2, 1) and scale.dtype == torch.float32
    assert PagedKVCache(**SHAPE).layer(0).key_scale is None


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_mla_values_are_a_view_of_the_keys(stored: str) -> None:
    spec = MLASpec(num_kv_heads=1, head_dim=12, latent_dim=8, kv_cache_dtype=stored)
    cache = PagedKVCache.from_specs([spec] * 2, num_blocks=3)
    layer = cache.layer(1)
    assert (layer.key.shape, layer.value.shape) == ((3, 16, 1, 12), (3, 16, 1, 8))
    layer.key.copy_(torch.randn(layer.key.shape))
    assert torch.equal(layer.value.float(), layer.key[..., :8].float())
    assert cache.nbytes == 2 * 3 * 16 * 12 * (4 if stored == "auto" else 1)


@pytest.mark.parametrize(("stored", "itemsize"), [("auto", 2), ("fp8", 1)])
def test_latent_blocks_are_copied_and_swapped_whole(stored: str, itemsize: int) -> None:
    spec = MLASpec(head_dim=12, latent_dim=8, block_size=4, dtype=torch.bfloat16, kv_cache_dtype=stored)
    cache = PagedKVCache.from_specs([spec] * 3, num_blocks=5)
    size = 4 * 12 * itemsize
    assert cache.bytes_per_block == spec.bytes_per_block == size and cache.slabs.shape == (3, 5, size)
    for index in range(3):
        cache.layer(index).key.copy_(torch.randn(5, 4, 1, 12))
    before = [cache.layer(index).key.float() for index in range(3)]
    cache.copy_blocks([(1, 3)])
    host = torch.zeros(3, 2, cache.bytes_per_block, dtype=torch.uint8)
    for slab, away in zip(cache.slabs, host, strict=True):
        ops.swap_blocks(slab, away, torch.tensor([[2, 0]]))
        ops.swap_blocks(away, slab, torch.tensor([[0, 4]]))
    for index, rows in enumerate(before):
        layer = cache.layer(index)
        assert torch.equal(layer.key.float(), rows[[0, 1, 2, 1, 2]])
        assert torch.equal(layer.value.float(), layer.key[..., :8].float())
    cache.zero_blocks([3])
    assert not bool(cache.layer(0).value[3].float().any())


def test_a_cache_whose_values_are_its_keys_has_a_layout_of_its_own() -> None:
    split, other = (PagedKVCache(2, 5, head_dim=8).layer(index) for index in range(2))
    joint = LayerCache(split.key, split.key, format=split.format)
    assert (joint.value.shape, joint.value.stride()) == (split.value.shape, split.value.stride())
    assert split.layout is other.layout is not joint.layout
    assert joint.layout is LayerCache(other.value, other.value, format=split.format).layout


def test_blocks_are_copied_in_all_layers_sources_first() -> None:
    cache = PagedKVCache(**SHAPE)
    cache.slabs.copy_(torch.randint(0, 256, cache.slabs.shape, dtype=torch.uint8))
    before = cache.slabs.clone()
    cache.copy_blocks([(0, 1), (1, 2), (2, 0)])
    assert torch.equal(cache.slabs, before[:, [2, 0, 1, 3, 4]])
    cache.copy_blocks([])
    cache.copy_blocks(torch.tensor([[3, 4]]))
    assert torch.equal(cache.slabs, before[:, [2, 0, 1, 3, 3]])


@pytest.mark.parametrize("ids", [[1, 3], torch.tensor([1, 3])], ids=["list", "tensor"])
def test_blocks_are_zeroed_in_all_layers(ids: list[int] | torch.Tensor) -> None:
    cache = PagedKVCache(**SHAPE)
    cache.slabs.fill_(255)
    cache.zero_blocks(ids)
    cache.zero_blocks([])
    assert not cache.slabs[:, [1, 3]].any() and bool((cache.slabs[:, [0, 2, 4]] == 255).all())


def test_a_block_outside_the_cache_changes_nothing() -> None:
    cache = PagedKVCache(**SHAPE)
    cache.slabs.fill_(7)
    for ids in ([0, 5], [-1], [6], [2**31 - 1]):
        with pytest.raises(InvalidInputError, match=r"ids must be blocks in \[0, 5\)"):
            cache.zero_blocks(ids)
    with pytest.raises(InvalidInputError, match="target blocks in"):
        cache.copy_blocks([(0, 5)])
    assert bool((cache.slabs == 7).all())


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"layout": "DHN"}, "layout must be one of NHD, HND"),
        ({"num_layers": 0}, "num_layers must be"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        PagedKVCache(**{**SHAPE, **asked})


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"index must be a layer in \[0, 3\), got 3"):
        PagedKVCache(**SHAPE).layer(3)


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_cache_beyond_2_to_the_31_elements(path: str) -> None:
    """Three blocks 2^30 elements apart; only the pages that hold them are ever touched."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    far = 1 << 30
    storage = torch.empty(2 * far + 4096, dtype=torch.float16, device=device)
    cache = storage.as_strided((3, 4, 1, 16), (far, 16, 16, 1))
    rows = torch.randn(2, 1, 16, device=device).half()
    ops.reshape_and_cache(rows, rows, cache, cache, torch.tensor([11, 4], device=device), path=path)
    assert torch.equal(cache[2, 3], rows[0]) and torch.equal(cache[1, 0], rows[1])
    cache[2] = rows[0]
    table, one, four = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2]], [0, 1], [4]))
    for bound in (1, 17):  # the decode kernel, and the other
        options = {"max_query_len": bound, "max_seq_len": 4, "scale": 1.0, "path": path}
        out = ops.paged_attention(rows[:1], cache, cache, table, one, four, **options)
        assert torch.allclose(out[0], rows[0], atol=1e-3)
    span = torch.tensor([0, 4], dtype=torch.int32, device=device)
    gathered, _ = ops.gather_kv(cache, None, table, span, 4, path=path)
    assert torch.equal(gathered, rows[:1].expand(4, 1, 16))


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_below_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidInputError, match=name):
        PagedKVCache(**{**SHAPE, name: value})


def test_an_unknown_kv_cache_dtype_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="kv_cache_dtype"):
        PagedKVCache(num_layers=1, num_blocks=4, kv_cache_dtype="int3")


def test_a_cache_that_does_not_fit_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        PagedKVCache(num_layers=1, num_blocks=2**40, num_kv_heads=8, head_dim=128, device="cpu")
    with pytest.raises(CapacityError, match="does not fit"):
        PagedKVCache(num_layers=1, num_blocks=2**60, num_kv_heads=8, head_dim=128, device="cpu")


def test_what_else_goes_wrong_is_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="foo") as error:
        PagedKVCache(num_layers=1, num_blocks=4, device="foo")
    assert not isinstance(error.value, CapacityError)


def test_int8_with_any_head_dim() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=2, block_size=1, head_dim=65, kv_cache_dtype="int8")
    assert cache.layer(0).key_scale is not None


SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(num_kv_heads=2, head_dim=8, block_size=4),
    SlidingWindowSpec(num_kv_heads=2, head_dim=8, block_size=4, sliding_window=8),
]


def test_groups_overlay_the_same_slabs() -> None:
    cache = PagedKVCache.from_specs(SPECS * 4, num_blocks=3)
    assert cache.slabs.shape[0] == 4
    assert [cache.group_of(layer) for layer in range(8)] == [0, 1] * 4
    assert [cache.layer(0).key.data_ptr(), cache.layer(2).key.data_ptr()] == [
        cache.layer(1).key.data_ptr(),
        cache.layer(3).key.data_ptr(),
    ]
    assert cache.nbytes == 4 * 3 * cache.bytes_per_block


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS_AND_KINDS)
def test_blocks_of_all_layers_move_to_another_cache_and_back(layout: str, kind: dict[str, Any]) -> None:
    cache = PagedKVCache(**SHAPE, layout=layout, **kind)
    cache.slabs.random_(0, 256, generator=torch.Generator().manual_seed(0))
    before = cache.slabs.clone()
    memory = torch.zeros(3, 9, cache.bytes_per_block, dtype=torch.uint8)
    host = cache.over(memory)
    assert host.slabs is memory and host.num_blocks == 9 and cache.over(memory[:, :0].contiguous()).num_blocks == 0
    cache.swap_blocks(host, [(1, 7), (4, 0)])
    assert torch.equal(memory[:, [7, 0]], before[:, [1, 4]]) and not memory[:, 1:7].any()
    assert all(
        torch.equal(mine[4].view(torch.uint8), theirs[0].view(torch.uint8))
        for mine, theirs in zip(views(cache.layer(2)), views(host.layer(2)), strict=True)
    )
    cache.zero_blocks([1, 4])
    host.swap_blocks(cache, torch.tensor([[7, 1], [0, 4]], dtype=torch.int32))
    assert torch.equal(cache.slabs, before)


def test_a_cache_is_refused_under_another_format() -> None:
    """Slabs of e4m3 and e5m2 have one shape and dtype, and so have keys of 8 bits in two layouts."""

    def made(name: str = "fp8_e4m3", **options: Any) -> PagedKVCache:
        return PagedKVCache(**{**SHAPE, "dtype": torch.float16, **options}, kv_cache_dtype=name)

    source = made()
    for target, word in (
        (made("fp8_e5m2"), r"fp8_e4m3 \(float8_e4m3fn, .*, got fp8_e5m2 \(float8_e5m2"),
        (made(layout="HND"), "NHD, at byte 0 of slab 0, got .*, HND"),
        (made(num_kv_heads=4, block_size=2), "blocks of 4 tokens with 2 KV heads .*, got .* 2 tokens with 4 KV heads"),
        (made(head_dim=10, head_dim_v=6), "heads of 6 and 10, .*, got .* heads of 10 and 6"),
        (made(num_layers=4), "stores layer 3 as none, got fp8_e4m3"),
        (made(num_layers=2), "stores layer 2 as fp8_e4m3 .*, got none; make both of the same specs"),
    ):
        assert target.slabs.dtype == source.slabs.dtype and target.bytes_per_block == source.bytes_per_block
        with pytest.raises(InvalidInputError, match=word):
            source.swap_blocks(target, [(1, 2)])
        assert not target.slabs.any()
    with pytest.raises(InvalidInputError, match=r"auto \(float16, .* got auto \(bfloat16"):
        made("auto").swap_blocks(made("auto", dtype=torch.bfloat16), [(1, 2)])
    with pytest.raises(InvalidInputError, match=r"target must be a PagedKVCache, got Tensor; ops\.swap_blocks"):
        source.swap_blocks(source.slabs, [(1, 2)])  # type: ignore[arg-type]
    source.swap_blocks(made("fp8", dtype=torch.bfloat16), [(1, 2)])  # another name of one format


def test_memory_of_another_shape_is_no_cache() -> None:
    cache = PagedKVCache(**SHAPE)
    size = cache.bytes_per_block
    for memory in (torch.zeros(3, 2, size), torch.zeros(2, 2, size).byte(), torch.zeros(3, 2, size + 1).byte()):
        with pytest.raises(InvalidInputError, match=r"memory must be torch.uint8 \[3, \*, "):
            cache.over(memory)
    with pytest.raises(InvalidInputError, match="memory must be contiguous"):
        cache.over(torch.zeros(3, 4, size, dtype=torch.uint8)[:, ::2])
