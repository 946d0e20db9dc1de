"""Device code that attention kernels share: logits from products, and the unit that they are held in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from ..formats.base import plane_strides
from ..runtime.op_registry import interpreted
from .inputs import AttentionInputs
from .tiles import block_dims

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(interpreted())


@triton.constexpr_function
def log_base(precision):
    """What logits are held in: base 2 saves a multiplication per logit, natural units keep float32's last digits."""
    return 1.0 if precision == "ieee" else 1.4426950408889634


@triton.jit
def tanh_by_instruction(x):
    """Exact to 1.1e-5 of its value on Hopper, as measured; PTX promises 2**-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh by its instruction on Hopper, else through exp2; PRECISE switches to a series where 1 - t would cancel."""
    if cuda_capability_geq(9) and not (cuda_capability_geq(10) or PRECISE or _INTERPRETED):
        y = tanh_by_instruction(x)
    else:
        t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - t) / (1.0 + t)
        if PRECISE:
            x2 = x * x
            series = 1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835))))
            y = tl.where(x2 < 0.04, tl.abs(x) * series, y)
        y = tl.where(x < 0, -y, y)
    return y


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


@triton.jit
def write_rows(
    acc, m_i, l_i, o_ptrs, there_ptrs, lse_out, lse_place, mask_m, mask_v, PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Write outputs [M, Dv] and, where there is a place for it, the LSE of their softmax [M].

    ACCUMULATE: `there_ptrs` and the place of the LSE hold attention of the rows over other keys, to which this is
    added. Where there is no key here, that is what is written.
    """
    lse = tl.where(l_i == 0, -float("inf"), m_i / log_base(PRECISION) + tl.log2(l_i) * LN2)
    if ACCUMULATE:
        before = tl.load(lse_out + lse_place, mask=mask_m, other=-float("inf"))
        there = tl.load(there_ptrs, mask=mask_m[:, None] & mask_v, other=0.0).to(tl.float32)
        peak = tl.maximum(lse, before)
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        weight, of_there = tl.exp(lse - shift), tl.exp(before - shift)
        total = weight + of_there
        lse = tl.where(total == 0, -float("inf"), shift + tl.log(total))
        total = tl.where(total == 0, 1.0, total)
        acc = acc * (weight / total)[:, None] + there * (of_there / total)[:, None]
    tl.store(o_ptrs, acc.to(o_ptrs.dtype.element_ty), mask=mask_m[:, None] & mask_v)
    if lse_out is not None:
        tl.store(lse_out + lse_place, lse, mask=mask_m)


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
