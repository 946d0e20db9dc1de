"""The oracle: attention of one sequence in float64, dense, written from the definition."""

from __future__ import annotations

import math

import torch

from ..spec import Mask

_CAUSAL = Mask(causal=True)
_LARGEST = 448.0  # of e4m3


def attention_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [q, Hq, D], key [k, Hkv, D], value [k, Hkv, Dv] -> output [q, Hq, Dv] and LSE [q, Hq], natural log.

    Query row i stands at position k - q + i. `dtype` other than float64 makes the naive low-precision implementation
    that tolerances are measured against.
    """
    rows, heads, length = *query.shape[:2], len(key)
    logits, v = _logits(query, key, value, scale, mask, softcap, alibi_slopes, dtype)
    extra = [] if sinks is None else [sinks.to(dtype)[:, None, None].expand(heads, rows, 1)]
    joined = torch.cat([logits, *extra], -1)
    if joined.shape[-1] == 0:
        empty = torch.full((rows, heads), -math.inf, dtype=dtype, device=query.device)
        return torch.zeros(rows, heads, value.shape[2], dtype=dtype, device=query.device), empty
    weights = joined.softmax(-1)[..., :length].nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), joined.logsumexp(-1).T


def fp8_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE as `attention_oracle` gives them, by queries and probabilities of e4m3, and rounded to bfloat16.

    The largest query element of a KV head becomes 448, the largest probability of a row 256. Keys and values are as
    they are stored. It makes the naive implementation that backends with `Capabilities.fp8_queries` are measured
    against.
    """
    if not len(key) or not len(query):
        return attention_oracle(query, key, value, scale=scale, mask=mask)
    groups = query.double().unflatten(1, (key.shape[1], -1))
    steps = groups.abs().amax((0, 2, 3), keepdim=True) / _LARGEST
    steps = torch.where(steps == 0, 1.0, steps)
    rounded = (_e4m3(groups / steps) * steps).flatten(1, 2)
    logits, v = _logits(rounded, key, value, scale, mask, softcap, alibi_slopes, torch.float64)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    shares = _e4m3(256 * weights) / (256 * total).masked_fill(total == 0, 1.0)
    return torch.einsum("hqk,khd->qhd", shares, v).bfloat16().double(), (total.log() + peak).squeeze(-1).T


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).double()


def logit_condition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """[q, Hq, Dv]: how far `out` is off by what was rounded in its logits, as a multiple of the dtype's epsilon.

    `out` and `lse` are the oracle's. A sum of D products, in whatever order, has D roundings, each of up to half an
    epsilon of a partial sum; they have either sign, so that they add up like sqrt(D), and partial sums are as large as
    the sum and the root of the products' squares together. The scaled logit is rounded again. One that is off by e_j
    moves the output by p_j (v_j - out) e_j; so much of each key, as if by chance, is the root of the sum of squares:
    next to nothing where one key has all the weight, and much where two large logits are nearly equal.

    Source: Higham and Mary, A new approach to probabilistic rounding error analysis (2019).
    """
    logits, v = _logits(query, key, value, scale, mask, softcap, alibi_slopes, torch.float64)
    sums, _ = _logits(query, key, value, scale, mask, None, None, torch.float64)
    squares, _ = _logits(query.double() ** 2, key.double() ** 2, value, scale**2, mask, None, None, torch.float64)
    off = query.shape[2] ** 0.5 / 2 * (sums.abs() + squares.abs().sqrt())
    if softcap:
        off = off * (1 - torch.tanh(sums / softcap) ** 2)
    moved = (logits - lse.T[:, :, None]).exp() * (off + logits.abs())
    squared = moved.masked_fill(logits == -math.inf, 0.0) ** 2
    first, second = (torch.einsum("hqk,khd->qhd", squared, x) for x in (v, v**2))
    return (second - 2 * out * first + out**2 * squared.sum(-1).T[..., None]).clamp_min(0).sqrt()


def _logits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [Hq, q, k], -inf where a key is masked, and values [k, Hq, Dv] of each query head."""
    (rows, heads, _), (length, kv_heads, _) = query.shape, key.shape
    q, k, v = (x.to(dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    i = torch.arange(rows)[:, None] + length - rows
    j = torch.arange(length)[None, :]
    i, j = i.to(query.device), j.to(query.device)
    if alibi_slopes is not None:
        distance = (j - i if mask.causal else -(i - j).abs()).to(dtype)
        logits = logits + alibi_slopes.to(dtype)[:, None, None] * distance
    return logits.masked_fill(~mask.visible(i, j), -math.inf), v
