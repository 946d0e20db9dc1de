"""Scales of fp8 caches: from the layer, its checkpoint or the call; which, the selection says; and what is read is
what was written times them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagedattn import Attention, CommonAttentionMetadata, PagedKVCache, paged_attention
from pagedattn.errors import InvalidInputError
from pagedattn.spec.scales import LayerScales, scale_kind

HEADS, KV_HEADS, DIM = 4, 2, 16
PER_HEAD = torch.tensor([0.02, 0.05]), torch.tensor([0.01, 0.04])


def layer_of(**options: Any) -> Attention:
    return Attention(HEADS, DIM, KV_HEADS, **{"kv_cache_dtype": "fp8", **options})


def attend(layer: Attention, seed: int = 0, **scales: Any) -> tuple[torch.Tensor, PagedKVCache, torch.Tensor]:
    """Output of 20 new tokens, the cache, and the keys that were written."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(20, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache = PagedKVCache(1, 4, 16, KV_HEADS, DIM, kv_cache_dtype="fp8")
    common = CommonAttentionMetadata.from_lengths([20], [20], torch.tensor([[2, 1]], dtype=torch.int32))
    return layer(q, k, v, cache.layer(0), common, **scales), cache, k


def stored(cache: PagedKVCache) -> torch.Tensor:
    return cache.layer(0).key[[2, 1]].float().flatten(0, 1)[:20]


@pytest.mark.parametrize(
    ("k_scale", "v_scale", "factor"),
    [(0.02, 0.01, 0.02), (torch.tensor(0.02), torch.tensor([0.01]), 0.02), (*PER_HEAD, PER_HEAD[0][:, None])],
    ids=["float", "tensor", "head"],
)
def test_scales_of_the_layer_and_of_the_call_are_used_alike(k_scale: Any, v_scale: Any, factor: Any) -> None:
    own, cache, keys = attend(layer_of(k_scale=k_scale, v_scale=v_scale))
    torch.testing.assert_close(stored(cache) * factor, keys, rtol=0.07, atol=0.001)
    kind = scale_kind(k_scale, v_scale)
    given, _, _ = attend(layer_of(kv_scale=kind), k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(own, given)
    plain, _, _ = attend(layer_of())
    assert not torch.equal(own, plain) and float((own - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(("shape", "kind"), [((), "float"), ((1,), "float"), ((KV_HEADS,), "head")])
def test_a_checkpoint_brings_scales(shape: tuple[int, ...], kind: str) -> None:
    layer = layer_of()
    assert layer.spec.kv_scale == "none" and "1.0" in layer.selection.describe()
    layer.load_state_dict({"k_scale": torch.full(shape, 0.02), "v_scale": torch.full(shape, 0.01)})
    assert layer.spec.kv_scale == kind
    assert "scales of the fp8_e4m3 cache: the checkpoint" in layer.selection.describe()
    expected, _, _ = attend(layer_of(k_scale=0.02, v_scale=0.01))
    torch.testing.assert_close(attend(layer)[0], expected)
    torch.testing.assert_close(attend(layer.to(torch.float32))[0], expected)


def test_the_selection_says_where_scales_come_from() -> None:
    assert "cache: the layer's arguments" in layer_of(k_scale=0.5).selection.describe()
    assert "cache: the call" in layer_of(kv_scale="head").selection.describe()
    assert "scales" not in Attention(HEADS, DIM).selection.describe()


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="given for fp8 caches only"):
        Attention(HEADS, DIM, k_scale=0.5)
    with pytest.raises(InvalidInputError, match="given for fp8 caches only"):
        Attention(HEADS, DIM).load_state_dict({"k_scale": torch.ones(1)})
    with pytest.raises(InvalidInputError, match="of one kind, got float and head"):
        layer_of(k_scale=0.5, v_scale=PER_HEAD[1])
    with pytest.raises(InvalidInputError, match="None where the layer has scales"):
        layer_of(k_scale=0.5, kv_scale="float")
    with pytest.raises(InvalidInputError, match="of the kind announced, kv_scale='head', got 'float'"):
        attend(layer_of(kv_scale="head"), k_scale=0.5, v_scale=0.5)
    with pytest.raises(InvalidInputError, match="kind announced, kv_scale=None"):
        attend(layer_of(), k_scale=0.5, v_scale=0.5)
    for one in ({"k_scale": 0.5}, {"v_scale": 0.5}):
        with pytest.raises(InvalidInputError, match=r"kv_scale='float', got no [kv]_scale; pass both"):
            attend(layer_of(kv_scale="float"), **one)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="kv_scale must be one of"):
        layer_of(kv_scale="token_head")
    with pytest.raises(InvalidInputError, match="k_scale must be a tensor, or a positive finite number, got True"):
        layer_of(k_scale=True)
    assert LayerScales.given(None, 0.5, None, "fp8_e5m2", KV_HEADS).kind == "float"


def test_a_list_is_no_scale() -> None:
    with pytest.raises(InvalidInputError, match=r"k_scale must be a tensor, or a positive finite number, got \[1"):
        layer_of(k_scale=[1.0, 2.0])


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan"), float("inf")])
def test_numbers_that_scale_nothing_are_refused(scale: float) -> None:
    with pytest.raises(InvalidInputError, match=f"k_scale must be a tensor, or a positive finite number, got {scale}"):
        layer_of(k_scale=scale)
    with pytest.raises(InvalidInputError, match=r"v_scale must be .*a positive finite number"):
        layer_of().load_state_dict({"k_scale": torch.ones(1), "v_scale": torch.tensor(scale)})


def test_scales_of_another_number_of_heads_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"v_scale must be of 1 or 2 elements, one per KV head, got \[3\]"):
        layer_of(v_scale=torch.ones(3))
    with pytest.raises(InvalidInputError, match="k_scale must be of 1 or 2 elements"):
        layer_of().load_state_dict({"k_scale": torch.ones(3)})


def test_without_a_layer() -> None:
    layer = layer_of(k_scale=0.02, v_scale=0.01)
    expected, cache, _ = attend(layer)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(20, HEADS, DIM, generator=generator)
    common = CommonAttentionMetadata.from_lengths([20], [20], torch.tensor([[2, 1]], dtype=torch.int32))
    out, _ = paged_attention(query, None, None, cache.layer(0), common, k_scale=0.02, v_scale=0.01)
    assert torch.equal(out, expected)


def test_a_checkpoint_may_come_in_shards_and_is_saved_again() -> None:
    layer = layer_of(k_scale=0.5, v_scale=0.25)
    layer.load_state_dict({"k_scale": torch.tensor(0.02)}, strict=False)
    layer.load_state_dict({"v_scale": torch.full((KV_HEADS, 1), 0.01)}, strict=False)
    expected, _, _ = attend(layer_of(k_scale=0.02, v_scale=0.01))
    torch.testing.assert_close(attend(layer)[0], expected)
    again = layer_of()
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(attend(again)[0], expected)
    assert not layer_of(k_scale=0.5).state_dict()


def test_tensors_survive_the_meta_device() -> None:
    layer = layer_of(k_scale=PER_HEAD[0], v_scale=PER_HEAD[1], device="meta").to_empty(device="cpu")
    own, _, _ = attend(layer_of(k_scale=PER_HEAD[0], v_scale=PER_HEAD[1]))
    torch.testing.assert_close(attend(layer)[0], own)


def test_keys_that_come_with_the_call_are_not_scaled() -> None:
    q, k, v = (torch.randn(6, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    common = CommonAttentionMetadata.from_lengths([6], [6])
    plain = Attention(HEADS, DIM, KV_HEADS)(q, k, v, None, common)
    assert torch.equal(layer_of(k_scale=0.25, v_scale=0.5)(q, k, v, None, common), plain)
    assert torch.equal(paged_attention(q, k, v, None, common, k_scale=0.25, v_scale=0.5)[0], plain)


def test_one_scale_per_head_of_one_head() -> None:
    layer = Attention(HEADS, DIM, 1, kv_cache_dtype="fp8", kv_scale="head")
    q, k, v = (torch.randn(6, heads, DIM) for heads in (HEADS, 1, 1))
    cache = PagedKVCache(1, 2, 16, 1, DIM, kv_cache_dtype="fp8")
    common = CommonAttentionMetadata.from_lengths([6], [6], torch.tensor([[1]], dtype=torch.int32))
    assert bool(
        torch.isfinite(layer(q, k, v, cache.layer(0), common, None, torch.tensor([0.1]), torch.tensor([0.1]))).all()
    )


def test_a_cache_of_other_elements_is_refused() -> None:
    wrong = PagedKVCache(1, 4, 16, KV_HEADS, DIM).layer(0)
    common = CommonAttentionMetadata.from_lengths([1], [1], torch.tensor([[1]], dtype=torch.int32))
    with pytest.raises(
        InvalidInputError, match="kv_cache must be of kv_cache_dtype='fp8_e4m3', got 'auto'; build layer and cache"
    ):
        layer_of()(torch.randn(1, HEADS, DIM), None, None, wrong, common)
    with pytest.raises(InvalidInputError, match="given for fp8 caches only"):
        paged_attention(torch.randn(1, HEADS, DIM), None, None, wrong, common, k_scale=0.5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -0.02, 1e-60])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_elements_of_scales_are_looked_at_by_level_2(name: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call, in the layer and in the function, whether something is written or not; of a layer when it is built."""
    scales: dict[str, Any] = {"k_scale": PER_HEAD[0], "v_scale": PER_HEAD[1], name: torch.tensor([0.02, wrong])}
    message = rf"{name} must be positive finite numbers, got \S+ at index 1; stored is value / scale"
    announced = layer_of(kv_scale="head")
    out, *_ = attend(announced, **scales)  # of a call, nothing is found without a look at the device
    assert out.shape == (20, HEADS, DIM)
    with pytest.raises(InvalidInputError, match=message):
        layer_of(**scales)  # on the CPU
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    cache = PagedKVCache(1, 4, 16, KV_HEADS, DIM, kv_cache_dtype="fp8").layer(0)
    common = CommonAttentionMetadata.from_lengths([1], [20], torch.tensor([[2, 1]], dtype=torch.int32))
    query = torch.zeros(1, HEADS, DIM)
    for run in (
        lambda: attend(announced, **scales),
        lambda: announced(query, None, None, cache, common, **scales),
        lambda: paged_attention(query, None, None, cache, common, **scales),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run()
    assert attend(announced, k_scale=PER_HEAD[0], v_scale=PER_HEAD[1])[0].isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -0.02])
def test_numbers_are_looked_at_where_nothing_is_written(wrong: float) -> None:
    layer = layer_of(kv_scale="float")
    cache = PagedKVCache(1, 4, 16, KV_HEADS, DIM, kv_cache_dtype="fp8").layer(0)
    common = CommonAttentionMetadata.from_lengths([1], [20], torch.tensor([[2, 1]], dtype=torch.int32))
    call = lambda scale: layer(torch.zeros(1, HEADS, DIM), None, None, cache, common, k_scale=1.0, v_scale=scale)  # noqa: E731
    assert call(0.5).isfinite().all()
    with pytest.raises(InvalidInputError, match=r"v_scale must be a positive finite number, got .*; stored is value"):
        call(wrong)
