"""How a cache stores keys and values: as they are, or as fp8 times a scale; written from the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..spec import Scale
from .case import Case

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Stored:
    """The element type of a cache and its scales."""

    dtype: torch.dtype
    k_scale: Scale = None
    v_scale: Scale = None

    def write_key(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., Hkv, D] as the cache keeps it."""
        return _write(rows, self.k_scale, self.dtype)

    def write_value(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., Hkv, Dv] as the cache keeps it."""
        return _write(rows, self.v_scale, self.dtype)

    def read_key(self, rows: torch.Tensor) -> torch.Tensor:
        """What attention sees of rows that went through the cache."""
        return _read(rows, self.write_key(rows), self.k_scale)

    def read_value(self, rows: torch.Tensor) -> torch.Tensor:
        """What attention sees of rows that went through the cache."""
        return _read(rows, self.write_value(rows), self.v_scale)

    def to(self, device: torch.device) -> Stored:
        """The same with scale tensors on `device`."""
        k, v = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (self.k_scale, self.v_scale))
        return replace(self, k_scale=k, v_scale=v)


def stored_as(case: Case) -> Stored:
    """Of a case: keys and values have scales of their own, no power of two."""
    dtype = _FP8.get(case.kv_cache_dtype, case.dtype)
    if case.kv_scale == "float":
        return Stored(dtype, 0.03, 0.011)
    if case.kv_scale == "tensor":
        return Stored(dtype, torch.tensor([0.03]), torch.tensor([0.011]))
    if case.kv_scale == "head":
        heads = torch.arange(case.heads[1], dtype=torch.float32)
        return Stored(dtype, 0.03 + 0.01 * heads, 0.011 + 0.003 * heads)
    return Stored(dtype)


def _factor(scale: Scale) -> float | torch.Tensor:
    if scale is None:
        return 1.0
    return scale[:, None] if isinstance(scale, torch.Tensor) else scale


def _write(rows: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize > 1:
        return rows.to(dtype)
    largest = torch.finfo(dtype).max
    return (rows.float() / _factor(scale)).clamp(-largest, largest).to(dtype)


def _read(rows: torch.Tensor, stored: torch.Tensor, scale: Scale) -> torch.Tensor:
    return rows if stored.dtype == rows.dtype else stored.double() * _factor(scale)
