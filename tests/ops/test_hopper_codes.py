"""Which calls over codes with scales the prefill kernel for Hopper serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import Mask, PagedKVCache
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.shape import INT4, K8V4, AttentionShape

INT8 = ("int8", "int8")
SHAPE = AttentionShape(torch.bfloat16, torch.uint8, 8, 4, 128, 128, (1, 0), False, True, False, 32)
BLOCKS = Mask(True, earlier_blocks=32, recent_blocks=2, from_block=1)


@pytest.mark.parametrize(
    ("codes", "changes", "reason"),
    [
        *((codes, {}, "") for codes in (INT8, K8V4, INT4)),
        *((codes, {"mask": BLOCKS.constants}, "") for codes in (INT8, K8V4, INT4)),
        (("e4m3", "e4m3"), {"mask": BLOCKS.constants}, "earlier_blocks"),
        (INT4, {"mask": BLOCKS.replace(sliding_window=100).constants}, "a window"),
        (INT4, {"mask": BLOCKS.replace(causal=False).constants}, "not causal"),
        (INT4, {"mask": Mask(True, own_block=32).constants}, "own_block"),
        (INT4, {"block_size": 16}, "steps of channels, served: 32 and more"),
        (K8V4, {"block_size": 16}, ""),
        *((codes, {"head_dim": 64, "head_dim_v": 64}, "values of 4 bits, served: 128") for codes in (K8V4, INT4)),
        (INT8, {"head_dim": 64, "head_dim_v": 64}, ""),
        (INT4, {"paged": False, "block_size": None}, "queries of"),
    ],
)
def test_codes_with_scales_are_served(codes: tuple[str, str], changes: dict[str, Any], reason: str) -> None:
    found = sm90.why_not(SHAPE._replace(codes=codes, **changes), "")
    assert reason in found and bool(reason) == bool(found), found


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [1, 2])
def test_steps_of_channels_begin_at_16_bytes(layout: str, heads: int) -> None:
    """As those of our own caches do."""
    kinds: dict[str, Any] = {"kv_cache_dtype": "int4", "dtype": torch.bfloat16, "layout": layout}
    layer = PagedKVCache(1, 3, 32, heads, 128, recent_blocks=3, **kinds).layer(0)
    query = torch.empty(5, 4 * heads, 128, dtype=torch.bfloat16)
    given = dict.fromkeys(AttentionInputs._fields)
    given |= {"query": query, "out": query, "key": layer.key, "value": layer.value}
    given |= {"kv_cache_dtype": "int4", "scale": 1.0, "out_scale": 1.0}
    for steps, reason in ((layer.key_scale, ""), (layer.key_scale[..., 4:], "begin at 16 bytes")):  # type: ignore[index]
        found = sm90.why_not_tensors(AttentionInputs(**given | {"k_scale_cache": steps}))  # type: ignore[arg-type]
        assert reason in found and bool(reason) == bool(found), found
