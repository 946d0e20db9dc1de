"""A stand-in for vLLM's TurboQuant kernels on a CPU: the same calls and bytes, packed and attended to by numpy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn.formats.turboquant.codebook import LEVELS, UNITS

OPS, FORMATS = "vllm.v1.attention.ops.triton_turboquant_", "vllm.model_executor.layers.quantization.turboquant."
BITS = {"turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3)}


@dataclass
class Config:
    """Of slots: the key's codes and two bytes, the value's codes and four, rounded up to an even number."""

    dim: int
    key_mse_bits: int
    effective_value_quant_bits: int
    norm_correction: bool = True

    @classmethod
    def from_cache_dtype(cls, name: str, dim: int) -> Config:
        return cls(dim, *BITS[name])

    @property
    def centroid_bits(self) -> int:
        return self.key_mse_bits

    @property
    def key_packed_size(self) -> int:
        return self.dim * self.key_mse_bits // 8 + 2

    @property
    def slot_size(self) -> int:
        return self.key_packed_size + self.dim * self.effective_value_quant_bits // 8 + 4

    @property
    def slot_size_aligned(self) -> int:
        return -(-self.slot_size // 2) * 2


def get_centroids(dim: int, bits: int) -> torch.Tensor:
    return torch.tensor(LEVELS[bits]) / UNITS[bits] * dim**-0.5


def packed(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Codes [n, D] as bytes [n, D * bits / 8], the lowest bit first."""
    single = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(single.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")


def unpacked(rows: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    single = np.unpackbits(rows, axis=1, bitorder="little").reshape(len(rows), -1, bits)
    return (single * (1 << np.arange(bits))).sum(-1)


def float16_bytes(*columns: torch.Tensor) -> np.ndarray[Any, Any]:
    """Numbers [n] as bytes [n, 2] of each."""
    return np.stack([one.numpy() for one in columns], -1).astype(np.float16).view(np.uint8)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: torch.Tensor,
    midpoints: torch.Tensor,
    *,
    mse_bits: int,
    key_packed_size: int,
    value_quant_bits: int,
) -> None:
    assert rotation.dtype == midpoints.dtype == torch.float32 and len(midpoints) == (1 << mse_bits) - 1
    assert torch.allclose(rotation @ rotation.T, torch.eye(len(rotation)), atol=1e-6)
    rows, values = key.float().flatten(0, 1), value.float().flatten(0, 1)
    length, least = rows.norm(dim=1), values.amin(1)
    step = (values.amax(1) - least) / ((1 << value_quant_bits) - 1)
    codes = torch.bucketize(rows / length[:, None] @ rotation, midpoints, right=True)
    levels = ((values - least[:, None]) / step[:, None]).round().long()
    parts = (packed(codes.numpy(), mse_bits), float16_bytes(length))
    parts += (packed(levels.numpy(), value_quant_bits), float16_bytes(step, least))
    slots = torch.from_numpy(np.concatenate(parts, 1)).unflatten(0, key.shape[:2])
    assert parts[0].shape[1] + 2 == key_packed_size and kv_cache.dtype == torch.uint8
    kv_cache.view(-1, *kv_cache.shape[2:])[slot_mapping, :, : slots.shape[-1]] = slots


def decode(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    Pi: torch.Tensor,
    PiT: torch.Tensor,
    centroids: torch.Tensor,
    scale: float,
    mse_bits: int,
    key_packed_size: int,
    value_quant_bits: int,
    norm_correction: bool,
    max_num_kv_splits: int,
    mid_o_buf: torch.Tensor,
    output_buf: torch.Tensor,
    lse_buf: torch.Tensor,
) -> torch.Tensor:
    seqs, heads, dim = query.shape
    assert mid_o_buf.shape == (seqs, heads, max_num_kv_splits, dim + 1) and lse_buf.shape == (seqs, heads)
    assert (mid_o_buf.dtype, lse_buf.dtype, output_buf.dtype) == (torch.float32, torch.float32, query.dtype)
    assert block_table.dtype == seq_lens.dtype == torch.int32 and kv_cache.is_contiguous() and PiT.is_contiguous()
    assert norm_correction and output_buf.shape == query.shape and len(centroids) == 1 << mse_bits
    rotated, size, group = query.float() @ PiT, kv_cache.shape[1], heads // kv_cache.shape[2]
    for seq, keys in enumerate(seq_lens.tolist()):
        slots = kv_cache[block_table[seq, : -(-keys // size)].long()].flatten(0, 1)[:keys].numpy()
        for head in range(heads):
            mine = np.ascontiguousarray(slots[:, head // group])
            at, end = key_packed_size, key_packed_size + dim * value_quant_bits // 8
            length = mine[:, at - 2 : at].copy().view(np.float16).astype(np.float32)
            step, least = np.split(mine[:, end : end + 4].copy().view(np.float16).astype(np.float32), 2, 1)
            rows = centroids[torch.from_numpy(unpacked(mine[:, : at - 2], mse_bits))]
            rows = rows / rows.norm(dim=1, keepdim=True) * torch.from_numpy(length)
            values = torch.from_numpy(unpacked(mine[:, at:end], value_quant_bits) * step + least).float()
            output_buf[seq, head] = (rows @ rotated[seq, head] * scale).softmax(0) @ values
    return output_buf


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's four modules are these functions."""
    modules = {
        f"{OPS}store": {"triton_turboquant_store": store},
        f"{OPS}decode": {"triton_turboquant_decode_attention": decode},
        f"{FORMATS}config": {"TurboQuantConfig": Config},
        f"{FORMATS}centroids": {"get_centroids": get_centroids},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
