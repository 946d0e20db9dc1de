"""Triton: write keys and values into their slots, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher

# Mantissa bits and exponent bias of the fp8 formats.
_FORMATS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}


@triton.jit
def _fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 to the bits of an fp8, nearest even and saturated. By integers: Triton casts to e4m3 on new GPUs only."""
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B  # 448, 57344
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Rounding may carry into the exponent, which is what it should do.
    half_less_one = (1 << (DROPPED - 1)) - 1
    rounded = (magnitude + half_less_one + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal, an addition aligns the last bit kept with the last bit of the sum.
    ALIGN: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    aligner = tl.full(x.shape, ALIGN, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + aligner).to(tl.int32, bitcast=True) - ALIGN
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_row(
    rows,
    cache,
    scale,
    scale_value,
    token,
    block,
    offset,
    s_rt,
    s_rh,
    s_cb,
    s_cs,
    s_ch,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    SCALES: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    index = tl.arange(0, N)  # [N] over heads and dims
    head, dim = (index // D).to(tl.int64), index % D  # a stride may be past 2**31 elements
    mask = index < H * D
    value = tl.load(rows + token * s_rt + head * s_rh + dim, mask=mask)
    if MANTISSA:
        divisor = scale_value
        if SCALES:
            divisor = tl.load(scale + head * (SCALES > 1), mask=mask, other=1.0)
        value = _fp8_bits(tl.div_rn(value.to(tl.float32), divisor), MANTISSA, BIAS)
    tl.store(cache + block * s_cb + offset * s_cs + head * s_ch + dim, value, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    k_scale,
    v_scale,
    k_scale_value,
    v_scale_value,
    num_slots,
    sk_t,
    sk_h,
    sv_t,
    sv_h,
    sck_b,
    sck_s,
    sck_h,
    scv_b,
    scv_s,
    scv_h,
    S: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    N: tl.constexpr,
    NV: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_MANTISSA: tl.constexpr,
    K_BIAS: tl.constexpr,
    V_MANTISSA: tl.constexpr,
    V_BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        block = slot // S
        offset = slot % S
        _write_row(
            key, key_cache, k_scale, k_scale_value, token, block, offset, sk_t, sk_h, sck_b, sck_s, sck_h,
            H, D, N, K_SCALES, K_MANTISSA, K_BIAS,
        )  # fmt: skip
        if value is not None:
            _write_row(
                value, value_cache, v_scale, v_scale_value, token, block, offset, sv_t, sv_h, scv_b, scv_s, scv_h,
                H, DV, NV, V_SCALES, V_MANTISSA, V_BIAS,
            )  # fmt: skip


# What differs from layer to layer of a step.
_launch = Launcher(
    _reshape_and_cache_kernel,
    (*("key", "value", "key_cache", "value_cache", "slots", "k_scale", "v_scale"), "k_scale_value", "v_scale_value"),
)


def launch(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_value: float,
    v_scale_value: float,
) -> None:
    """Shapes as in `reshape_and_cache`; both tensors in one launch. A scale tensor, where there is one, is 1-D."""
    blocks, size, heads, dim = key_cache.shape
    v, vc = (key, key_cache) if value is None or value_cache is None else (value, value_cache)
    (k_mantissa, k_bias), (v_mantissa, v_bias) = _conversion(key, key_cache), _conversion(v, vc)
    arguments = (
        *(_bits(key), None if value is None else _bits(value)),
        *(_bits(key_cache), None if value_cache is None else _bits(value_cache)),
        *(slot_mapping, k_scale, v_scale, k_scale_value, v_scale_value, blocks * size),
        *(*key.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *vc.stride()[:3]),
    )
    constants = {
        "S": size,
        "H": heads,
        "D": dim,
        "DV": v.shape[2],
        "N": 1 << (heads * dim - 1).bit_length(),
        "NV": 1 << (heads * v.shape[2] - 1).bit_length(),
        "K_SCALES": 0 if k_scale is None else len(k_scale),
        "V_SCALES": 0 if v_scale is None else len(v_scale),
        "K_MANTISSA": k_mantissa,
        "K_BIAS": k_bias,
        "V_MANTISSA": v_mantissa,
        "V_BIAS": v_bias,
    }
    with on_device(key):
        _launch((len(slot_mapping),), arguments, constants, num_warps=4 if heads * dim >= 512 else 1)


def _conversion(rows: torch.Tensor, cache: torch.Tensor) -> tuple[int, int]:
    """The fp8 format that rows are converted to; zeros where they are copied."""
    return (0, 0) if rows.dtype == cache.dtype else _FORMATS[cache.dtype]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _FORMATS else tensor
