"""Rotary embedding equals transformers to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import hf_config

from pagedattn.engine.models.config import parse_model_config
from pagedattn.engine.models.rope import RopeConfig, RotaryEmbedding, inverse_frequencies, rotate

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 128},
    "llama3-from-positions": {**LLAMA3, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn-whole": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention": {**YARN, "attention_factor": 0.5},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn-ratio": {**YARN, "factor": None},
}


def theirs(name: str, head_dim: int) -> tuple[Any, Any]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = hf_config("llama3", head_dim=head_dim, rope_parameters=dict(KINDS[name]))
    return config, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [16, 96, 128])
@pytest.mark.parametrize("name", KINDS)
def test_equals_transformers_bitwise(name: str, head_dim: int) -> None:
    config, reference = theirs(name, head_dim)
    raw = {**config.to_dict(), "rope_parameters": KINDS[name]}
    ours = parse_model_config(raw).rope
    assert torch.equal(inverse_frequencies(ours, head_dim), reference.inv_freq)
    positions = torch.tensor([0, 1, 7, 100, 511])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        cos, sin = RotaryEmbedding(ours, head_dim, 512, dtype, "cpu")(positions)
        want_cos, want_sin = reference(torch.empty(0, dtype=dtype), positions[None])
        assert torch.equal(cos.squeeze(1), want_cos[0, :, : head_dim // 2])
        assert torch.equal(sin.squeeze(1), want_sin[0, :, : head_dim // 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotation_equals_transformers_bitwise(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    query, key = torch.randn(9, 4, 32).to(dtype), torch.randn(9, 2, 32).to(dtype)
    cos, sin = RotaryEmbedding(RopeConfig(), 32, 16, dtype, "cpu")(torch.arange(9))
    want = apply_rotary_pos_emb(query, key, torch.cat((cos, cos), -1)[:, 0], torch.cat((sin, sin), -1)[:, 0])
    assert torch.equal(rotate(query, cos, sin), want[0])
    assert torch.equal(rotate(key, cos, sin), want[1])


def test_rotation_keeps_length_and_relative_position() -> None:
    torch.manual_seed(0)
    rope = RotaryEmbedding(RopeConfig(), 64, 128, torch.float64, "cpu")
    x, y = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(x, *rope(torch.tensor([i]))) * rotate(y, *rope(torch.tensor([j])))).sum()

    torch.testing.assert_close(score(5, 3), score(102, 100), rtol=0, atol=1e-4)
    assert not torch.isclose(score(5, 3), score(5, 4), rtol=0, atol=1e-2)
    torch.testing.assert_close(rotate(x, *rope(torch.tensor([77]))).norm(), x.norm(), rtol=1e-6, atol=0)


def test_every_kind_differs_from_the_default() -> None:
    plain = inverse_frequencies(RopeConfig(theta=1e4), 16)
    for name in ("llama3", "yarn", "yarn-whole"):
        config, _ = theirs(name, 16)
        scaled = inverse_frequencies(parse_model_config(config.to_dict()).rope, 16)
        assert not torch.allclose(scaled, plain), name
