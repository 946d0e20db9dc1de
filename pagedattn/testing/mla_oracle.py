"""The oracle of latent attention (MLA): one sequence in float64, expanded and absorbed, from the definitions.

Source: DeepSeek-V2 (2024), section 2.1. Both forms are the same function of the same inputs; what rounds differs.
"""

from __future__ import annotations

import torch

from ..spec import Mask
from .oracle import attention_oracle

_CAUSAL = Mask(causal=True)


def mla_expanded_oracle(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q_nope [q, H, N], q_pe [q, H, R], latent [k, L], k_pe [k, R], w_uk [H, N, L], w_uv [H, V, L] -> output [q, H, V]
    and LSE [q, H], natural log: each head has keys [W_UK c | k_pe] and values W_UV c.

    Query row i stands at position k - q + i. `dtype`: what is computed in.
    """
    heads, rows = w_uk.shape[0], latent.to(dtype)
    key = torch.einsum("kl,hnl->khn", rows, w_uk.to(dtype))
    key = torch.cat((key, k_pe.to(dtype)[:, None].expand(-1, heads, -1)), -1)
    value = torch.einsum("kl,hvl->khv", rows, w_uv.to(dtype))
    query = torch.cat((q_nope, q_pe), -1)
    return attention_oracle(query, key, value, scale=scale, mask=mask, softcap=softcap, dtype=dtype)


def mla_absorbed_oracle(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same: queries q_nope W_UK of all heads over one key [c | k_pe] with value c, and W_UV applied to the sum."""
    absorbed = torch.einsum("qhn,hnl->qhl", q_nope.to(dtype), w_uk.to(dtype))
    query = torch.cat((absorbed, q_pe.to(dtype)), -1)
    key = torch.cat((latent, k_pe), -1)[:, None]
    options = {"scale": scale, "mask": mask, "softcap": softcap, "dtype": dtype}
    out, lse = attention_oracle(query, key, latent[:, None], **options)
    return torch.einsum("qhl,hvl->qhv", out, w_uv.to(dtype)), lse
