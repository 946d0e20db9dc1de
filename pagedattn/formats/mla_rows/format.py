"""Latent rows: one plane [P, S, 1, width], the torch half. The value of a row is its first L elements, a view.

A row is written from two tensors and read as two parts, so that it is no `RowFormat`, whose rows are of one kind. Its
elements are stored as those of keys are (`formats/native`, `formats/fp8`), with one scale for both parts, or as
`deepseek.py` says.
"""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ..registry import ALIASES, format_of
from . import deepseek

LATENT_DTYPES = ("auto", "fp8_e4m3", deepseek.NAME)  # what `kv_cache_dtype` may be over latent rows


def stores_rows(kv_cache_dtype: str) -> bool:
    """Whether a format stores latent rows."""
    return ALIASES.get(kv_cache_dtype, kv_cache_dtype) in LATENT_DTYPES


def require_rows(kv_cache_dtype: str) -> None:
    """Raise UnsupportedError for a format that does not store latent rows, InvalidInputError for what is no format."""
    if not stores_rows(format_of(kv_cache_dtype).name):
        raise UnsupportedError(
            f"latent rows (MLA) are stored in the model's dtype or in e4m3, kv_cache_dtype={kv_cache_dtype!r} is not "
            "served; use kv_cache_dtype='auto' or 'fp8', or 'fp8_ds_mla' for rows of 512 + 64"
        )


def format_name(rows: torch.Tensor) -> str:
    """What `kv_cache_dtype` rows [..., width] are of, "auto" where their dtype says it."""
    return deepseek.NAME if rows.dtype == torch.uint8 else "auto"


def join(latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """latent [T, L] and k_pe [T, R] as rows [T, 1, L + R]."""
    return torch.cat((latent, k_pe), -1)[:, None]


def split(rows: torch.Tensor, latent_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., L + R] as views of both parts, [..., L] and [..., R]."""
    return rows[..., :latent_dim], rows[..., latent_dim:]


def decode(rows: torch.Tensor, scale: float | torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored rows [..., width] as what they stand for. scale: of e4m3, a number or float32 [1]; None is 1. Products
    with it are float32 (float64 for float64), and rounded once."""
    if rows.dtype == dtype:
        return rows
    if rows.dtype == torch.uint8:
        return deepseek.decode(rows, dtype)
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    return (wide if scale is None else wide * scale).to(dtype)
