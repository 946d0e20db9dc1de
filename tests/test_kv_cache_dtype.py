"""KVCacheDtype: what it says of each layer, and caches whose layers have different formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagedattn import (
    Attention,
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheDtype,
    PagedKVCache,
    SlidingWindowSpec,
    ops,
)
from pagedattn.cache.specs import KVCacheSpec, group_layers
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.formats.registry import FORMATS, format_of


def test_what_it_says_of_each_layer() -> None:
    some = KVCacheDtype("int8", (0, -1))
    assert some.of_layers(4) == ["auto", "int8", "int8", "auto"] and some.of_layers(2) == ["auto", "auto"]
    assert KVCacheDtype.of("int8:skip=0,-1") == some == KVCacheDtype.of(some) and str(some) == "int8:skip=0,-1"
    assert KVCacheDtype.of("fp8").of_layers(2) == ["fp8_e4m3", "fp8_e4m3"] and str(KVCacheDtype()) == "auto"
    assert KVCacheDtype("fp8") == KVCacheDtype("fp8_e4m3"), "one format by two names"
    for wrong in ("64", 64.5, True):
        with pytest.raises(InvalidInputError, match="window must be a number of tokens, got"):
            KVCacheDtype("turboquant4", window=wrong)  # type: ignore[arg-type]
    for wrong in (0, None):
        with pytest.raises(InvalidInputError, match="skip_layers must be integers, each once, got"):
            KVCacheDtype("int8", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_a_pair_of_its_own(name: str) -> None:
    stored = KVCacheDtype(name, () if name == "auto" else (0, 2))
    assert KVCacheDtype(key=stored.key, value=stored.value, skip_layers=stored.skip_layers) == stored
    given = str(stored).replace(name, f"key={stored.key},value={stored.value}")
    assert KVCacheDtype.of(given) == stored and hash(KVCacheDtype.of(given)) == hash(stored)
    assert FORMATS[name].key is format_of(stored.name).key and FORMATS[name].value is format_of(stored.name).value


def test_keys_and_values_apart() -> None:
    assert KVCacheDtype(key="int8", value="rotated_int4").name == "k8v4"
    assert KVCacheDtype(key="turboquant3", value="turboquant4").name == "turboquant_k3v4"
    assert KVCacheDtype(key="fp8", value="fp8_e4m3") == KVCacheDtype("fp8_e4m3")
    assert (KVCacheDtype("fp8").key, KVCacheDtype().value) == ("fp8_e4m3", "auto")
    some = KVCacheDtype(key="int8", value="rotated_int4", skip_layers=[1])
    assert str(some) == "k8v4:skip=1" and replace(some, skip_layers=()) == KVCacheDtype("k8v4")
    cache = PagedKVCache(2, 3, 4, 2, 8, kv_cache_dtype="key=int8,value=rotated_int4:skip=0")
    assert [cache.layer(index).format or "auto" for index in range(2)] == ["auto", "k8v4"]
    assert Attention(4, 8, 2, kv_cache_dtype=KVCacheDtype(key="int8", value="int8")).spec.kv_cache_dtype == "int8"


@pytest.mark.parametrize("text", ["turboquant4:window=0", "turboquant2:window=0:first=3", "turboquant3:first=3"])
def test_no_window_where_models_have_one(text: str) -> None:
    given = KVCacheDtype.of(text)
    assert KVCacheDtype(given.name) == KVCacheDtype(text) == given and given.name == text
    assert str(replace(given, skip_layers=(0,))) == f"{text}:skip=0"
    assert KVCacheDtype.of_model(KVCacheDtype(text)).window == (0 if "window" in text else 64)
    assert KVCacheDtype("turboquant4:window=0", window=8) == KVCacheDtype("turboquant4", window=8)


@pytest.mark.parametrize(
    "text", [f"int8:window={'9' * 5000}", f"int8:first={'9' * 5000}", "int8:skip=1_0", "int8:skip=+5", "int8:skip=٣"]
)
def test_numbers_are_of_a_few_digits(text: str) -> None:
    with pytest.raises(InvalidInputError, match="kv_cache_dtype must be"):
        KVCacheDtype.of(text)
    assert KVCacheDtype.of("int8:skip=0, -1").skip_layers == (0, -1)


@pytest.mark.parametrize("size", ["32", 32.0, 0, -32, True])
def test_blocks_have_a_whole_number_of_tokens(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="block_size must be a number of tokens, at least 1"):
        KVCacheDtype("int4").block_size(size)


def test_a_block_size_of_numpy_is_one() -> None:
    size: Any = np.int64(32)
    assert KVCacheDtype("int4").block_size(size) == PagedKVCache(1, 4, size, 2, 8).layer(0).key.shape[1] == 32


def test_a_window() -> None:
    some = KVCacheDtype("turboquant4", (0,), window=40)
    assert some.name == "turboquant4:window=40" and str(some) == "turboquant4:window=40:skip=0"
    assert (
        KVCacheDtype.of(str(some))
        == some
        == KVCacheDtype(key="turboquant4", value="turboquant4", skip_layers=[0], window=40)
    )
    assert KVCacheDtype.of("key=int8,value=rotated_int4:window=8").name == "k8v4:window=8"
    assert KVCacheDtype.of("int8:window=0") == KVCacheDtype("int8") and some.block_size(None) == 32
    form = format_of("turboquant4:window=40")
    assert form is format_of("turboquant4:window=40") and form.key is FORMATS["turboquant4"].key and form.whole_blocks
    assert [form.recent_blocks(size) for size in (1, 8, 16, 39, 40, 64)] == [40, 5, 3, 2, 1, 1]
    assert Attention(4, 8, 2, kv_cache_dtype="int8:window=3").spec.block_size == 16
    first = KVCacheDtype.of("key=int8,value=rotated_int4:window=8:first=20:skip=0")
    assert (first.name, first.window, first.first) == ("k8v4:window=8:first=20", 8, 20)
    assert first == KVCacheDtype("k8v4", [0], window=8, first=20) == KVCacheDtype.of(str(first))
    form = format_of("turboquant4:first=20")
    assert form is format_of("turboquant4:first=20") and form.whole_blocks and not form.recent_blocks(16)
    assert (form.first_blocks(16), form.first_blocks(20)) == (2, 1) and form.encoded_as == "turboquant4"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVCacheDtype.of("int8:window=x"), "TOKENS:first=TOKENS:skip=LAYERS, .* got 'int8:window=x'"),
        (lambda: KVCacheDtype.of("int8:window=4:0"), "TOKENS:first=TOKENS:skip=LAYERS, .* got 'int8:window=4:0'"),
        (lambda: KVCacheDtype("int8", window=-1), "window must be tokens in 0..1073741823, got -1"),
        (lambda: KVCacheDtype("int8", first=-1), "first must be tokens in 0..1073741823, got -1"),
        (
            lambda: KVCacheDtype("turboquant4", window=1 << 40),
            "window must be tokens in 0..1073741823, got 1099511627776",
        ),
        (lambda: KVCacheDtype("fp8", first=4), "first must be 0 for kv_cache_dtype='fp8_e4m3', got 4; pass first=0"),
        (lambda: KVCacheDtype("int8:window=4", first=4), "first must be 0 for kv_cache_dtype='int8:window=4', got 4"),
        (lambda: KVCacheDtype.of("int8:first=4:window=4"), "NAME:window=TOKENS:first=TOKENS:skip=LAYERS, .* got"),
        (lambda: KVCacheDtype.of("int8:first=4:"), "NAME:window=TOKENS:first=TOKENS:skip=LAYERS, .* got"),
        (lambda: KVCacheDtype("fp8", window=4), "window must be 0 for kv_cache_dtype='fp8_e4m3', got 4; pass window=0"),
        (lambda: KVCacheDtype.of("auto:window=4"), "window must be 0 for kv_cache_dtype='auto', got 4"),
        (lambda: format_of("int8:window=4:window=5"), "kv_cache_dtype must be one of auto"),
        (lambda: format_of("int9:window=4"), "kv_cache_dtype must be one of auto, .* got 'int9'"),
        (
            lambda: PagedKVCache(1, 4, 16, 2, 8, kv_cache_dtype="int8:window=20"),
            "recent_blocks must be given .* 4 for each sequence, and one for each block_size",
        ),
        (lambda: KVCacheDtype.of("int9:skip=0"), "kv_cache_dtype must be one of auto, .*, got 'int9'"),
        (
            lambda: KVCacheDtype.of("int8:0,1"),
            "kv_cache_dtype must be the name of a format, or NAME:window=TOKENS:first=TOKENS:skip=LAYERS",
        ),
        (
            lambda: KVCacheDtype.of("int8:skip=first"),
            "or with some of the three, such as int8:skip=0,-1, got 'int8:skip=first'",
        ),
        (lambda: KVCacheDtype.of(cast(Any, 8)), "kv_cache_dtype must be the name of a format, .* got 8"),
        (
            lambda: KVCacheDtype(key="rotated_int4", value="int8"),
            "key and value must be a pair that a format has: 'auto' and 'auto'; .*'int8' and 'rotated_int4'; .*, got "
            "'rotated_int4' and 'int8'; docs/formats.md",
        ),
        (lambda: KVCacheDtype.of("key=int8,value=int9"), "key and value must be a pair .* got 'int8' and 'int9'"),
        (lambda: KVCacheDtype(key=cast(Any, [8]), value="int8"), r"key and value must be a pair .* got \[8\]"),
        (lambda: KVCacheDtype(key="int8"), "kv_cache_dtype must be a name, or both a key and a value, got key='int8'"),
        (lambda: KVCacheDtype("int8", value="int8"), "both a key and a value, got name='int8', value='int8'"),
        (lambda: KVCacheDtype("k8v4", key="int8", value="rotated_int4"), "a name, or both a key and a value, got name"),
        (lambda: KVCacheDtype.of("value=int8,key=int8"), "got 'value=int8,key=int8'; for NAME key=NAME,value=NAME"),
        (lambda: KVCacheDtype.of(""), "kv_cache_dtype must be one of auto, .*, got ''"),
        (lambda: KVCacheDtype("int8", (1, 1)), r"skip_layers must be integers, each once, got \(1, 1\)"),
        (lambda: KVCacheDtype("int8", (True,)), "skip_layers must be integers"),
        (lambda: KVCacheDtype("auto", (1,)), r"skip_layers must be \(\) for kv_cache_dtype='auto', got \(1,\); name a"),
        (lambda: KVCacheDtype("int8", (4,)).of_layers(4), r"skip_layers must be layers in \[-4, 4\), got 4"),
        (lambda: KVCacheDtype("int8", (3, -1)).of_layers(4), r"skip_layers must be each layer once, got \(3, -1\)"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


def specs(names: list[str], heads: int = 3, dim: int = 20, dtype: torch.dtype = torch.float16) -> list[KVCacheSpec]:
    shape: dict[str, Any] = {"num_kv_heads": heads, "head_dim": dim, "dtype": dtype, "block_size": 4}
    return [FullAttentionSpec(**shape, kv_cache_dtype=name) for name in names]


@pytest.mark.parametrize("name", ["turboquant4", "k3v4", "turboquant2"])
def test_a_model_leaves_what_turboquant_read_last(name: str) -> None:
    """A name alone has no window for layers and caches, one of 64 for models; what is said counts for both."""
    form = format_of(name).name
    usual, none = KVCacheDtype.of_model(name), KVCacheDtype.of_model(f"{name}:window=0")
    assert (
        KVCacheDtype.of(name).name == form
        and usual == KVCacheDtype(name, window=64)
        and usual.name == f"{form}:window=64"
    )
    assert none == KVCacheDtype(name, window=0) != KVCacheDtype(name) and (none.of_one_layer(), none.window) == (
        form,
        0,
    )
    assert str(none) == f"{form}:window=0" and KVCacheDtype.of_model(str(none)) == none
    assert KVCacheDtype.of_model(KVCacheDtype(name, [0], first=4)) == KVCacheDtype(name, [0], window=64, first=4)
    kept = KVCacheDtype(name, (-1,), window=0, first=4)
    assert kept.of_layers(2) == [f"{form}:first=4", "auto"] and replace(kept, skip_layers=()).window == 0
    assert str(kept) == f"{form}:window=0:first=4:skip=-1" and KVCacheDtype.of_model(str(kept)) == kept
    assert str(KVCacheDtype.of_model(f"{name}:window=5")) == f"{form}:window=5"


@pytest.mark.parametrize("name", ["auto", "int8", "fp8", "k8v4", "int4"])
def test_models_have_no_window_of_other_formats(name: str) -> None:
    assert KVCacheDtype.of_model(name) == KVCacheDtype(name) == KVCacheDtype(name, window=0)
    assert str(KVCacheDtype(name, window=0)) == format_of(name).name


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(3, 20, torch.float16), (2, 128, torch.bfloat16), (1, 7, torch.float32)]
)
def test_layers_of_several_formats_share_blocks(layout: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    names = ["auto", "int8", "k8v4", "fp8_e4m3", "turboquant3", "auto"]
    kinds = specs(names, heads, dim, dtype)
    cache = PagedKVCache.from_specs(kinds, 6, layout=layout)
    assert len(cache.groups) == 1 and cache.num_layers == len(names)
    assert cache.slabs.shape == (1, 6, cache.bytes_per_block)
    least = sum(spec.bytes_per_block for spec in kinds)
    assert least <= cache.bytes_per_block < 1.5 * least
    rows = torch.randn(len(names), 2, 9, heads, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    slots = torch.tensor([3, 0, 23, 9, 17, 4, 12, 20, 6])
    for index in range(len(names)):
        layer = cache.layer(index)
        key, value = rows[index]
        ops.reshape_and_cache(key, value, layer.key, layer.value, slots, path="torch", **layer.stored)
    cache.copy_blocks([(5, 3)])
    for index, name in enumerate(names):
        layer, form = cache.layer(index), format_of(name)
        for given, kind, planes in zip(rows[index], (form.key, form.value), layer.sides, strict=True):
            for block in (5, 3):
                found = [plane[block : block + 1, 3].view(torch.uint8) for plane in planes]
                wanted = [one[2:3].view(torch.uint8) for one in kind.encode(given)]
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (name, block)
        for plane in layer.planes:
            step = plane.stride(1) * plane.element_size()
            assert plane.storage_offset() * plane.element_size() % 4 == 0 or dim == 7
            assert layout == "HND" or plane.stride(0) * plane.element_size() % step == 0, "whole slots apart"
    cache.zero_blocks([3, 5])
    assert not cache.slabs[:, [3, 5]].any() and cache.slabs.any()


def test_formats_beside_windows_are_refused() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "dtype": torch.float16}
    mixed = [
        FullAttentionSpec(**shape),
        FullAttentionSpec(**shape, kv_cache_dtype="int8"),
        SlidingWindowSpec(**shape, sliding_window=8, kv_cache_dtype="int8"),
    ]
    with pytest.raises(UnsupportedError, match=r"does not divide the \d+ bytes of the largest kind .*leave skip= out"):
        group_layers(mixed)
    windows = [replace(mixed[2], kv_cache_dtype="auto"), replace(mixed[2], kv_cache_dtype="auto", head_dim=17)]
    with pytest.raises(UnsupportedError, match="choose block sizes with equal bytes"):
        group_layers(windows)


def test_layer_and_cache_take_the_value() -> None:
    some = KVCacheDtype("int8", (0, -1))
    for given in (some, "int8:skip=0,-1"):
        cache = PagedKVCache(4, 3, num_kv_heads=2, head_dim=16, kv_cache_dtype=given)
        assert [cache.layer(index).format for index in range(4)] == some.of_layers(4)
        with pytest.raises(
            InvalidInputError, match=r"one layer, without skip=, got 'int8:skip=0,-1'; give each .*of_lay"
        ):
            Attention(2, 16, kv_cache_dtype=given)
    with pytest.raises(InvalidInputError, match=r"skip_layers must be layers in \[-1, 1\)"):
        PagedKVCache(1, 3, kv_cache_dtype="int8:skip=1")
    for given in (KVCacheDtype("fp8"), "fp8"):
        assert Attention(2, 16, kv_cache_dtype=given, k_scale=0.5, v_scale=0.5).spec.kv_cache_dtype == "fp8_e4m3"
        assert PagedKVCache(1, 3, kv_cache_dtype=given).layer(0).format == "fp8_e4m3"


def test_layers_by_their_names_serve_a_cache_that_skips_some() -> None:
    stored = KVCacheDtype("int8", (0,))
    cache = PagedKVCache(2, 3, num_kv_heads=2, head_dim=16, kv_cache_dtype=stored)
    common = CommonAttentionMetadata.from_lengths([20], [20], torch.tensor([[2, 1]], dtype=torch.int32))
    rows = torch.randn(3, 20, 2, 16, generator=torch.Generator().manual_seed(0))
    outs = [
        Attention(2, 16, 2, kv_cache_dtype=name)(*rows, cache.layer(index), common)
        for index, name in enumerate(stored.of_layers(2))
    ]
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.05)
