"""AttentionSpec: its defaults and refusals. Capabilities: what is asked and not served is refused, with both values."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn import AttentionSpec, AttentionType, Mask
from pagedattn.errors import InvalidInputError
from pagedattn.spec import (
    CACHE_LAYOUTS,
    KV_CACHE_DTYPES,
    KV_SCALES,
    Capabilities,
    ContextParallel,
    GraphLevel,
    IntRange,
)
from pagedattn.spec.capabilities import NO_INTEGERS

BASE = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EVERYTHING = Capabilities(
    devices=("cpu", "cuda"),
    dtypes=DTYPES,
    kv_cache_dtypes=KV_CACHE_DTYPES,
    kv_scales=KV_SCALES,
    head_dims=IntRange(),
    any_head_dim_v=True,
    latent_dims=IntRange(),
    rope_dims=IntRange(0),
    latent_kv_cache_dtypes=KV_CACHE_DTYPES,
    block_sizes=IntRange(),
    cache_layouts=CACHE_LAYOUTS,
    attn_types=tuple(AttentionType),
    non_causal=True,
    masks=("sliding_window", "mask_mod"),
    softcap=True,
    alibi=True,
    sinks=True,
    lse=True,
    context_parallel=True,
    deterministic=True,
    compile=True,
    graph_level=GraphLevel.ALWAYS,
)
RANKS = ContextParallel(world=2, rank=1)
LATENT: dict[str, Any] = {"latent_dim": 512, "head_dim": 576, "num_kv_heads": 1, "head_dim_v": 512, "scale": 0.07}


def keep_all(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return (kv_idx == kv_idx) & (q_idx == q_idx)


# Field of Capabilities: (its restricted value, what the spec asks, the rejection's feature, requested, supported)
RESTRICTIONS = {
    "devices": (("cpu",), {"device_type": "cuda"}, "device_type", "cuda", "cpu"),
    "min_capability": ((8, 0), {"capability": (7, 5)}, "capability", (7, 5), "at least (8, 0)"),
    "max_capability": ((9, 0), {"capability": (10, 0)}, "capability", (10, 0), "at most (9, 0)"),
    "dtypes": ((torch.float32, torch.float16), {"dtype": torch.bfloat16}, "dtype", "bfloat16", "float32, float16"),
    "kv_cache_dtypes": (("auto", "int8"), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8_e4m3", "auto, int8"),
    "kv_scales": (("none", "float"), {"kv_cache_dtype": "fp8", "kv_scale": "head"}, "kv_scale", "head", "none, float"),
    "head_dims": (IntRange(16, 256, 8), {"head_dim": 100}, "head_dim", 100, "multiples of 8 in 16..256"),
    "any_head_dim_v": (False, {"head_dim_v": 32}, "head_dim_v", 32, "head_dim (64) only"),
    "latent_dims": (IntRange(values=(256,)), LATENT, "latent_dim", 512, "256"),
    "rope_dims": (IntRange(values=(0,)), LATENT, "rope_dim", 64, "0"),
    "latent_kv_cache_dtypes": (
        ("auto",),
        {**LATENT, "kv_cache_dtype": "fp8"},
        *("kv_cache_dtype", "fp8_e4m3", "auto"),
    ),
    "block_sizes": (IntRange(16, None, 16), {"block_size": 24}, "block_size", 24, "multiples of 16 in 16 and more"),
    "cache_layouts": (("NHD",), {"cache_layout": "HND"}, "cache_layout", "HND", "NHD"),
    "gqa_ratios": (IntRange(values=(1, 4, 8)), {"num_heads": 10}, "gqa_ratio", 5, "1, 4, 8"),
    "attn_types": ((AttentionType.DECODER,), {"attn_type": AttentionType.CROSS}, "attn_type", "cross", "decoder"),
    "non_causal": (False, {"mask": Mask(False)}, "causal", False, "none"),
    "masks": (("mask_mod",), {"mask": Mask(sliding_window=7)}, "sliding_window", 7, "none"),
    "softcap": (False, {"softcap": 30.0}, "softcap", 30.0, "none"),
    "alibi": (False, {"has_alibi": True}, "has_alibi", True, "none"),
    "sinks": (False, {"has_sinks": True}, "has_sinks", True, "none"),
    "lse": (False, {"needs_lse": True}, "needs_lse", True, "none"),
    "context_parallel": (False, {"context_parallel": RANKS}, "context_parallel", RANKS, "none"),
    "deterministic": (False, {"deterministic": True}, "deterministic", True, "none"),
    "compile": (False, {"compile": True}, "compile", True, "none"),
    "graph_level": (GraphLevel.UNIFORM_BATCH, {"graph_level": GraphLevel.ALWAYS}, "graph_level", "ALWAYS",
                    "up to UNIFORM_BATCH"),
    "needs_clean_cache": (True, {}, "clean_cache", False, "clean caches only"),
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(RESTRICTIONS))
def test_what_is_not_served_is_refused_once_with_its_values(field: str) -> None:
    served, asked, feature, requested, supported = RESTRICTIONS[field]
    restricted = replace(EVERYTHING, **{field: served})
    spec = replace(BASE, **asked)
    found = restricted.rejections(spec)
    assert [(one.feature, one.requested, str(one.supported)) for one in found] == [(feature, requested, supported)]
    assert str(found[0]).startswith(f"{feature}={requested} (serves {supported})")
    assert EVERYTHING.rejections(spec) == []
    if asked:
        assert restricted.rejections(BASE) == []


def test_every_capability_is_tested() -> None:
    # These refuse nothing.
    facts = ("default_block_size", "rounded_lse", "rounded_states", "fp8_products", "fp8_queries")
    assert sorted([*RESTRICTIONS, *facts]) == sorted(field.name for field in fields(Capabilities))


def test_every_reason_is_given_not_only_the_first() -> None:
    nothing = Capabilities(devices=("cuda",), dtypes=(torch.float16,), head_dims=IntRange(128), block_sizes=IntRange())
    spec = BASE.replace(sliding_window=5, has_sinks=True, causal=False)
    found = {one.feature for one in nothing.rejections(spec)}
    assert found == {"device_type", "dtype", "head_dim", "sliding_window", "has_sinks", "causal"}


def test_a_hint_says_what_to_do() -> None:
    caps = replace(EVERYTHING, block_sizes=IntRange(values=(256,)), default_block_size=256, needs_clean_cache=True)
    block, clean = caps.rejections(BASE.replace(block_size=16))
    assert str(block) == "block_size=16 (serves 256): build the cache with block_size=256"
    assert "zero_blocks" in clean.hint
    assert caps.rejections(BASE.replace(block_size=256, clean_cache=True)) == []
    no_cache = BASE.replace(attn_type=AttentionType.ENCODER_ONLY, block_size=None)
    assert caps.rejections(no_cache) == []


@pytest.mark.parametrize(
    ("numbers", "inside", "outside", "text"),
    [
        (IntRange(), (1, 7, 4096), (0, -1), "1 and more"),
        (IntRange(16, 64), (16, 17, 64), (15, 65), "16..64"),
        (IntRange(16, 256, 16), (16, 32, 256), (24, 272, 8), "multiples of 16 in 16..256"),
        (IntRange(values=(64, 128)), (64, 128), (96, 1), "64, 128"),
        (IntRange(values=()), (), (0, 1), "-"),
    ],
)
def test_int_range(numbers: IntRange, inside: tuple[int, ...], outside: tuple[int, ...], text: str) -> None:
    assert all(n in numbers for n in inside)
    assert not any(n in numbers for n in outside)
    assert str(numbers) == text


def test_defaults() -> None:
    spec = AttentionSpec(num_heads=6, head_dim=80)
    assert (spec.num_kv_heads, spec.head_dim_v, spec.kv_heads, spec.value_dim) == (6, 80, 6, 80)
    assert (spec.gqa_ratio, spec.softmax_scale, spec.causal, spec.uses_cache) == (1, 80**-0.5, True, True)
    assert (spec.sliding_window, spec.softcap, spec.block_size, spec.kv_cache_dtype) == (None, None, None, "auto")
    assert AttentionSpec(num_heads=6, head_dim=80, kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
    assert AttentionSpec(num_heads=6, head_dim=80, softcap=0).softcap is None
    assert AttentionSpec(num_heads=6, head_dim=80, scale=2).scale == 2.0


@pytest.mark.parametrize(
    ("kind", "causal", "cached"),
    [
        (AttentionType.DECODER, True, True),
        (AttentionType.ENCODER, False, False),
        (AttentionType.ENCODER_ONLY, False, False),
        (AttentionType.CROSS, False, True),
    ],
)
def test_each_type_has_its_own_default(kind: AttentionType, causal: bool, cached: bool) -> None:
    spec = AttentionSpec(num_heads=2, head_dim=16, attn_type=kind)
    assert (spec.causal, spec.uses_cache) == (causal, cached)
    assert AttentionSpec(num_heads=2, head_dim=16, attn_type=kind, mask=Mask(causal=True)).causal is True


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 2.0}, "num_heads"),
        ({"num_heads": True}, "num_heads"),
        ({"head_dim": -64}, "head_dim"),
        ({"head_dim_v": -1}, "head_dim_v"),
        ({"num_kv_heads": 3}, "num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"block_size": 0}, "block_size"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"kv_scale": "block"}, "kv_scale"),
        ({"cache_layout": "DHN"}, "cache_layout"),
        ({"attn_type": "bogus"}, "attn_type"),
        ({"graph_level": "ALWAYS"}, "graph_level"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{param} must be ") as error:
        AttentionSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, **asked})
    assert error.value.param == param


@pytest.mark.parametrize(
    ("values", "param"),
    [((0, 0), "world"), ((2, 2), "rank"), ((2, -1), "rank"), ((2, 0, 0), "interleave"), ((2.0, 0), "world")],
)
def test_context_parallel_refuses(values: tuple[int, ...], param: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"context_parallel\.{param}"):
        ContextParallel(*values)


def test_specs_are_values() -> None:
    assert hash(BASE) == hash(AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64))
    assert BASE.replace(sliding_window=4).replace(sliding_window=None) == BASE
    assert BASE.replace(mask_mod=keep_all) == BASE.replace(mask_mod=keep_all) != BASE
    assert BASE.replace(mask_mod=lambda b, h, q, k: k == k) != BASE.replace(mask_mod=lambda b, h, q, k: k == k)
    with pytest.raises(AttributeError):
        BASE.head_dim = 3  # type: ignore[misc]


def test_numbers_of_numpy_are_numbers() -> None:
    spec = AttentionSpec(num_heads=np.int64(8), num_kv_heads=np.int32(2), head_dim=np.int64(64))  # type: ignore[arg-type]
    assert spec == BASE and type(spec.num_heads) is int


def test_a_type_given_as_a_string_means_the_type() -> None:
    spec = AttentionSpec(num_heads=2, head_dim=16, attn_type="decoder")  # type: ignore[arg-type]
    assert spec.causal is True


def test_a_latent_spec_has_one_kv_head_and_a_value_that_is_part_of_the_key() -> None:
    spec = AttentionSpec(num_heads=16, head_dim=576, latent_dim=512, scale=0.07)
    assert (spec.kv_heads, spec.value_dim, spec.rope_dim, spec.gqa_ratio) == (1, 512, 64, 16)
    assert spec == AttentionSpec(num_heads=16, **LATENT) and spec.replace(num_heads=8).gqa_ratio == 8
    assert BASE.rope_dim == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"scale": None},
            r"^scale must be given .*None; pass \(nope_dim \+ rope_dim\) \*\* -0.5, times the square of yarn",
        ),
        ({"latent_dim": 577}, r"^latent_dim must be in 1..576"),
        ({"latent_dim": 0}, r"^latent_dim must be an integer of at least 1"),
        ({"num_kv_heads": 2}, r"^num_kv_heads must be 1 where latent_dim=512"),
        ({"head_dim_v": 128}, r"^head_dim_v must be 512 where latent_dim=512"),
    ],
)
def test_a_latent_spec_that_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AttentionSpec(**{"num_heads": 16, **LATENT, **asked})


@pytest.mark.parametrize(
    ("asked", "feature", "supported"),
    [
        ({"attn_type": AttentionType.CROSS}, "attn_type", "decoder with latent_dim"),
        ({"has_alibi": True}, "has_alibi", "none with latent_dim"),
        ({"has_sinks": True}, "has_sinks", "none with latent_dim"),
        ({"mask": Mask(mask_mod=keep_all)}, "mask_mod", "none with latent_dim"),
    ],
)
def test_what_latent_attention_lacks_is_refused_whatever_a_backend_has(
    asked: dict[str, Any], feature: str, supported: str
) -> None:
    found = EVERYTHING.rejections(AttentionSpec(num_heads=16, **LATENT, **asked))
    assert [(one.feature, str(one.supported)) for one in found] == [(feature, supported)]


def test_a_backend_without_latent_attention_says_just_that() -> None:
    plain = replace(EVERYTHING, latent_dims=NO_INTEGERS, any_head_dim_v=False, head_dims=IntRange(1, 256))
    (only,) = plain.rejections(AttentionSpec(num_heads=16, **LATENT, kv_cache_dtype="fp8"))
    assert str(only) == "latent_dim=512 (serves none): it does not serve latent attention (MLA)"
    assert not plain.serves_mla and EVERYTHING.serves_mla


def test_no_head_dim_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"^head_dim"):
        AttentionSpec(num_heads=8, head_dim=0)


@pytest.mark.parametrize("asked", [{"softcap": float("inf")}, {"scale": float("nan")}, {"scale": float("inf")}])
def test_values_that_make_every_output_nan_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        AttentionSpec(num_heads=2, head_dim=16, **asked)
