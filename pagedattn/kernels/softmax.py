"""Device code that attention kernels share: logits from products, and the unit that they are held in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..formats.base import plane_strides
from .inputs import AttentionInputs
from .tiles import block_dims

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def log_base(precision):
    """What logits are held in: base 2 saves a multiplication per logit, natural units keep float32's last digits."""
    return 1.0 if precision == "ieee" else 1.4426950408889634


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh through exp2; PRECISE switches to a series where 1 - t would cancel."""
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    if PRECISE:
        x2 = x * x
        series = 1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835))))
        y = tl.where(x2 < 0.04, tl.abs(x) * series, y)
    return tl.where(x < 0, -y, y)


@triton.jit
def scaled_logits(
    s, distance, slope, qk_scale, softcap,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys, scaled, capped and biased, in the unit that logits are held in."""
    PRE: tl.constexpr = log_base(PRECISION)
    if SOFTCAP:
        s = (softcap * PRE) * tanh(s * (qk_scale / softcap), PRECISE=PRECISION == "ieee")
    else:
        s = s * (qk_scale * PRE)
    if ALIBI:
        bias = distance if CAUSAL else -tl.abs(distance)
        s += (slope * PRE)[:, None] * bias.to(tl.float32)
    return s


def features(inputs: AttentionInputs) -> dict[str, Any]:
    """Constants of both attention kernels: what a call's heads are, how it masks, and how its cache stores."""
    query, kv_heads, dim_v, form = inputs.query, inputs.key.shape[-2], inputs.out.shape[2], inputs.format
    dim = query.shape[2]
    block_d, block_dv = block_dims(dim, dim_v)
    return {
        "GROUP": query.shape[1] // kv_heads,
        "D": dim,
        "DV": dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "MASK": tuple(inputs.mask),
        "SOFTCAP": inputs.softcap > 0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "K_FORMAT": form.key.kernels,
        "V_FORMAT": form.value.kernels,
        "K_SCALE_STRIDES": plane_strides(inputs.k_scale_cache),
        "V_SCALE_STRIDES": plane_strides(inputs.v_scale_cache),
    }
