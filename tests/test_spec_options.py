"""The options that describe a layer: one for every property, with the defaults of this machine."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
import torch

from pagedattn import AttentionSpec, AttentionType
from pagedattn.cli.spec_options import add_spec_options, spec_of
from pagedattn.errors import InvalidInputError
from pagedattn.spec import ContextParallel, GraphLevel, Mask

ALL_OPTIONS = (
    *("--kv-heads", "2", "--head-dim-v", "32", "--dtype", "bf16"),
    *("--device", "cuda", "--capability", "9.0", "--kv-cache-dtype", "fp8", "--kv-scale", "float"),
    *("--block-size", "32", "--layout", "HND", "--window", "4096", "--softcap", "30", "--alibi", "--sinks", "--lse"),
    *("--non-causal", "--attn-type", "cross", "--context-parallel", "2", "--deterministic", "--compile"),
    *("--graph-level", "uniform_batch", "--clean-cache"),
)


def spec(*options: str) -> AttentionSpec:
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    return spec_of(parser.parse_args(["--heads", "8", "--head-dim", "64", *options]))


def test_every_property_of_a_layer_has_an_option() -> None:
    expected = AttentionSpec(
        **{"num_heads": 8, "head_dim": 64, "num_kv_heads": 2, "head_dim_v": 32, "dtype": torch.bfloat16},
        **{"device_type": "cuda", "capability": (9, 0), "kv_cache_dtype": "fp8", "kv_scale": "float"},
        **{"block_size": 32, "cache_layout": "HND", "mask": Mask(False, 4096), "softcap": 30.0, "has_alibi": True},
        **{"has_sinks": True, "needs_lse": True, "attn_type": AttentionType.CROSS},
        **{"context_parallel": ContextParallel(2, 0), "deterministic": True, "compile": True},
        **{"graph_level": GraphLevel.UNIFORM_BATCH, "clean_cache": True},
    )
    assert spec(*ALL_OPTIONS) == expected
    # A command line cannot name a function. (scale, which has no option, is derived and changes nobody's answer.)
    same = {one.name for one in fields(AttentionSpec) if getattr(expected, one.name) == one.default}
    assert same == {"latent_dim"} and expected.mask.mask_mod is None  # a latent layer has no KV heads to choose
    assert spec().causal and not spec("--non-causal").causal


def test_a_latent_layer_is_an_option_with_the_usual_row() -> None:
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    rows = {"--mla": (576, 512), "--mla 256": (320, 256), "--head-dim 512 --mla": (512, 512)}
    for options, sizes in rows.items():
        found = spec_of(parser.parse_args(["--heads", "16", *options.split()]))
        assert (found.head_dim, found.latent_dim) == sizes and found.kv_heads == 1
    with pytest.raises(InvalidInputError, match=r"^--head-dim must be given, but for --mla"):
        spec_of(parser.parse_args(["--heads", "16"]))


def test_device_capability_and_dtype_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (spec().device_type, spec().capability, spec().dtype) == ("cpu", None, torch.float32)
    assert (spec("--device", "cuda").capability, spec("--device", "cuda").dtype) == (None, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert (spec().device_type, spec().capability, spec().dtype) == ("cuda", (9, 0), torch.bfloat16)
    assert spec("--capability", "8.6").capability == (8, 6)
    assert spec("--device", "cpu").capability is None
    assert spec("--dtype", "bfloat16").dtype == spec("--dtype", "bf16").dtype == torch.bfloat16


def test_one_layer_skips_none() -> None:
    assert spec("--kv-cache-dtype", "int8").kv_cache_dtype == "int8"
    with pytest.raises(InvalidInputError, match="kv_cache_dtype must be the format of one layer, without skip="):
        spec("--kv-cache-dtype", "int8:skip=0")
