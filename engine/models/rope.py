"""Rotary position embedding: default, llama3 and yarn frequencies, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pagedattn.errors import InvalidInputError, UnsupportedError

_KINDS = ("default", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies by value. The fields after `factor` are read by the kinds named in their comment only."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: positions before the context was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp

    @classmethod
    def from_model_config(cls, raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older configs, from a parsed config.json.

        Raises:
            UnsupportedError: another kind of scaling, or one that differs by layer or covers part of a head.
            InvalidInputError: a missing or bad value.
        """
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise InvalidInputError("rope_parameters", "a JSON object", repr(rope))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _KINDS or any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedError(f"rope {rope} is not supported; supported types: {', '.join(_KINDS)}")
        if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1):
            raise UnsupportedError("rotary embedding of part of a head (partial_rotary_factor) is not supported")
        theta = _number(rope, "rope_theta", raw.get("rope_theta", 10_000.0))
        if theta <= 1:
            raise InvalidInputError("rope_theta", "above 1", theta)
        if kind == "default":
            return cls(theta=theta)
        original = raw.get("original_max_position_embeddings")
        if original is None:
            original = rope.get("original_max_position_embeddings", max_positions)
        if type(original) is not int or original < 1:
            raise InvalidInputError("original_max_position_embeddings", "a positive integer", repr(original))
        read = _read_llama3 if kind == "llama3" else _read_yarn
        return read(cls(kind=kind, theta=theta, original_max_positions=original), rope, max_positions)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position, computed once in float32 and stored in the model's dtype.

    transformers computes them in float32 whatever the model's dtype, float64 included; so does this.
    """

    cos_sin: torch.Tensor  # [max_positions, head_dim]: head_dim / 2 cosines, then as many sines

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        freqs = torch.arange(max_positions).float()[:, None] * inverse_frequencies(config, head_dim)
        table = torch.cat((freqs.cos(), freqs.sin()), dim=-1) * config.attention_factor
        self.register_buffer("cos_sin", table.to(device=device, dtype=dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] to cosines and sines, each [T, 1, head_dim / 2]."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, D] by its position; element i pairs with i + D / 2. cos and sin are [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 angles per position, computed on the CPU with the operations of transformers in order.

    Sources: RoFormer (arXiv 2104.09864), the Llama 3.1 release (llama3), YaRN (arXiv 2309.00071).
    """
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "llama3":
        return _llama3(1.0 / powers, config)
    if config.kind == "yarn":
        return _yarn(powers, config, head_dim)
    return 1.0 / powers


def _llama3(freqs: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    longest = config.original_max_positions / config.low_freq_factor
    shortest = config.original_max_positions / config.high_freq_factor
    waves = 2 * math.pi / freqs
    scaled = torch.where(waves > longest, freqs / config.factor, freqs)
    smooth = config.original_max_positions / waves - config.low_freq_factor
    smooth = smooth / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - smooth) * scaled / config.factor + smooth * scaled
    return torch.where((waves >= shortest) & (waves <= longest), between, scaled)


def _yarn(powers: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """A ramp over the dimensions from the kept frequencies to those divided by `factor`."""

    def dimension_with(rotations: float) -> float:
        ratio = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _read_llama3(config: RopeConfig, rope: Mapping[str, Any], max_positions: int) -> RopeConfig:
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise InvalidInputError("rope high_freq_factor", f"above low_freq_factor ({low})", high)
    return replace(config, factor=_number(rope, "factor"), low_freq_factor=low, high_freq_factor=high)


def _read_yarn(config: RopeConfig, rope: Mapping[str, Any], max_positions: int) -> RopeConfig:
    ratio = max_positions / config.original_max_positions
    factor = ratio if rope.get("factor") is None else _number(rope, "factor")
    return replace(
        config,
        factor=factor,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=_number(rope, "beta_fast", 32) if rope.get("beta_fast") else 32.0,
        beta_slow=_number(rope, "beta_slow", 1) if rope.get("beta_slow") else 1.0,
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(_number(rope, "mscale")) / magnitude(_number(rope, "mscale_all_dim"))
    return magnitude(1.0)


def _number(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = rope.get(key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InvalidInputError(f"rope {key}", "a positive finite number", repr(value))
    return float(value)
