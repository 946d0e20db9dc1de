"""Latent rows: one plane [P, S, 1, L + R], the torch half. The value of a row is its first L elements, a view.

A row is written from two tensors and read as two parts, so that it is no `RowFormat`, whose rows are of one kind.
"""

from __future__ import annotations

import torch

from ...errors import UnsupportedError

LATENT_DTYPES = ("auto",)  # what `kv_cache_dtype` may be over latent rows


def require_native(kv_cache_dtype: str) -> None:
    """Raise UnsupportedError where latent rows are to be stored otherwise than in the model's dtype."""
    if kv_cache_dtype not in LATENT_DTYPES:
        raise UnsupportedError(
            f"latent rows (MLA) are stored in the model's dtype, kv_cache_dtype={kv_cache_dtype!r} is not served; "
            "use kv_cache_dtype='auto'"
        )


def join(latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """latent [T, L] and k_pe [T, R] as rows [T, 1, L + R]."""
    return torch.cat((latent, k_pe), -1)[:, None]


def split(rows: torch.Tensor, latent_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., L + R] as views of both parts, [..., L] and [..., R]."""
    return rows[..., :latent_dim], rows[..., latent_dim:]
