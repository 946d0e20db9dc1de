"""Triton kernels of the small ops between a decoder's matrix products, rounding where the torch path rounds.

Each reads and writes every byte once. Elements are computed in float32 and rounded to the model's dtype after each
operation that torch would round after, so that both paths draw the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedattn import LayerCache

from ...pdl import PDLKernel, pdl_wait

Scale = float | torch.Tensor | None

_SILU_BLOCK = 1024


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """float32 values as the model's dtype holds them."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    stride_x,
    stride_r,
    eps,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, N)  # [N] over the row
    mask = index < SIZE
    scale = tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)  # a weight, which does not change
    pdl_wait(PDL)
    KIND: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * stride_x + index, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = _rounded(value + tl.load(residual + row * stride_r + index, mask=mask, other=0.0).to(tl.float32), KIND)
        tl.store(residual + row * stride_r + index, value.to(KIND), mask=mask)
    normed = _rounded(value * tl.rsqrt(tl.sum(value * value) / SIZE + eps), KIND)
    tl.store(out + row * SIZE + index, (normed * scale).to(KIND), mask=mask)


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] over the row
    mask = index < SIZE
    KIND: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * stride + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + index, mask=mask, other=0.0).to(tl.float32)
    active = _rounded(gate / (1.0 + tl.exp(-gate)), KIND)
    tl.store(out + row * SIZE + index, (active * up).to(KIND), mask=mask)


@triton.jit
def _turned(rows, weight, cos, sin, live, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads [heads, D] of a row, normed and turned by their position, as two halves [heads, HALF]."""
    KIND: tl.constexpr = cos.dtype.element_ty
    dim = tl.arange(0, HALF)  # [HALF]
    there = dim < D // 2
    mask = live[:, None] & there[None, :]
    first = tl.load(rows[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows[:, None] + D // 2 + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)  # [heads]
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        scales = weight + dim
        first = _rounded(_rounded(first * inverse, KIND) * tl.load(scales, mask=there).to(tl.float32)[None, :], KIND)
        second = _rounded(
            _rounded(second * inverse, KIND) * tl.load(scales + D // 2, mask=there).to(tl.float32)[None, :], KIND
        )
    c = tl.load(cos + dim, mask=there, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + dim, mask=there, other=0.0).to(tl.float32)[None, :]
    return (
        _rounded(first * c, KIND) - _rounded(second * s, KIND),
        _rounded(second * c, KIND) + _rounded(first * s, KIND),
    )


@triton.jit
def _turn_in_place(rows, weight, cos, live, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """As `_turned`, to where they were."""
    KIND: tl.constexpr = cos.dtype.element_ty
    dim = tl.arange(0, HALF)  # [HALF]
    mask = live[:, None] & (dim < D // 2)[None, :]
    first, second = _turned(rows, weight, cos, cos + D // 2, live, eps, D, HALF, NORM)
    target = rows[:, None] + dim[None, :]
    tl.store(target, first.to(KIND), mask=mask)
    tl.store(target + D // 2, second.to(KIND), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_written"])
def _qkv_kernel(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    slots,
    key_cache,
    value_cache,
    k_scale_cache,
    v_scale_cache,
    k_scale,
    v_scale,
    k_scale_value,
    v_scale_value,
    num_slots,
    num_written,
    eps,
    stride_row,
    stride_angle,
    sk_b,
    sk_s,
    sk_h,
    sv_b,
    sv_s,
    sv_h,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
    ENCODE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_SCALE_STRIDES: tl.constexpr,
    V_SCALE_STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part): AT_ONCE query heads, turned in place, or as many key and value heads, to the cache. To a
    cache that does ENCODE, as its formats write rows, ENCODE key heads, or as many value heads."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    KIND: tl.constexpr = qkv.dtype.element_ty
    cos = cos_sin + tl.load(positions + token).to(tl.int64) * stride_angle
    dim = tl.arange(0, HALF)  # [HALF]
    row = qkv + token * stride_row
    keys = row + HEADS * D
    if part < QUERY_PARTS:
        head = part * AT_ONCE + tl.arange(0, AT_ONCE)  # [heads]
        _turn_in_place(row + head * D, q_weight, cos, head < HEADS, eps, D, HALF, NORM)
    else:
        slot = tl.load(slots + token, mask=token < num_written, other=-1)
        if (slot >= 0) & (slot < num_slots):
            block, offset = slot // S, slot % S
            if ENCODE:
                KEY_PARTS: tl.constexpr = KV_HEADS // ENCODE
                if part < QUERY_PARTS + KEY_PARTS:
                    first = (part - QUERY_PARTS) * ENCODE
                    index = tl.arange(0, triton.next_power_of_2(ENCODE))  # [heads]
                    own = keys + first * D
                    _turn_in_place(own + index * D, k_weight, cos, index < ENCODE, eps, D, HALF, NORM)
                    tl.debug_barrier()  # what one thread has turned, others encode
                    _write_heads(
                        own, key_cache, k_scale_cache, k_scale, k_scale_value, sk_b, sk_s, sk_h, first, block, offset,
                        K_FORMAT, K_SCALE_STRIDES, ENCODE, D, K_SCALES,
                    )  # fmt: skip
                else:
                    first = (part - QUERY_PARTS - KEY_PARTS) * ENCODE
                    _write_heads(
                        keys + (KV_HEADS + first) * D, value_cache, v_scale_cache, v_scale, v_scale_value,
                        sv_b, sv_s, sv_h, first, block, offset, V_FORMAT, V_SCALE_STRIDES, ENCODE, D, V_SCALES,
                    )  # fmt: skip
            else:
                head = (part - QUERY_PARTS) * AT_ONCE + tl.arange(0, AT_ONCE)
                live = head < KV_HEADS
                mask = live[:, None] & (dim < D // 2)[None, :]
                one, two = _turned(keys + head * D, k_weight, cos, cos + D // 2, live, eps, D, HALF, NORM)
                wide = head.to(tl.int64)  # a stride may be past 2**31 elements
                target = key_cache + block * sk_b + offset * sk_s + (wide * sk_h)[:, None] + dim[None, :]
                tl.store(target, one.to(KIND), mask=mask)
                tl.store(target + D // 2, two.to(KIND), mask=mask)
                values = keys + KV_HEADS * D + (head * D)[:, None] + dim[None, :]
                target = value_cache + block * sv_b + offset * sv_s + (wide * sv_h)[:, None] + dim[None, :]
                tl.store(target, tl.load(values, mask=mask), mask=mask)
                tl.store(target + D // 2, tl.load(values + D // 2, mask=mask), mask=mask)


@triton.jit
def _write_heads(
    rows, codes, scales, scale, scale_value, s_b, s_s, s_h, first, block, offset, FORMAT: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Store rows [H, D] of one token and the KV heads from `first` on, as FORMAT does those of all heads."""
    index = tl.arange(0, triton.next_power_of_2(H))
    head = (first + index).to(tl.int64)  # a stride may be past 2**31 elements
    scale_row = head
    if SCALE_STRIDES is not None:
        scale_row = block * SCALE_STRIDES[0] + offset * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
    FORMAT.write_rows(
        rows, codes, scales, scale, scale_value, index * D, block * s_b + offset * s_s + head * s_h, scale_row, head,
        index < H, index < H, D, SCALES,
    )  # fmt: skip


_rms_norm, _silu_mul, _qkv = map(PDLKernel, (_rms_norm_kernel, _silu_mul_kernel, _qkv_kernel))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """As `fused_ops.rms_norm`: a row [size] per program."""
    rows, size = x.shape
    out, block = torch.empty(rows, size, dtype=x.dtype, device=x.device), triton.next_power_of_2(size)
    added = x if residual is None else residual
    constants = {"SIZE": size, "N": block, "ADD": residual is not None}
    arguments = (x, added, weight, out, x.stride(0), added.stride(0), eps)
    _rms_norm((rows,), arguments, constants, num_warps=_warps(block))
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `fused_ops.silu_mul`: a piece of a row per program."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid, constants = (rows, triton.cdiv(size, _SILU_BLOCK)), {"SIZE": size, "BLOCK": _SILU_BLOCK}
    _silu_mul(grid, (gate_up, out, gate_up.stride(0)), constants, num_warps=4)
    return out


def turn_and_write(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    scales: tuple[Scale, Scale] = (None, None),
) -> None:
    """As `fused_ops.turn_and_write`, a few heads of a token per program."""
    size, kv_heads, dim = *cache.key.shape[1:3], cos_sin.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    at_once = min(8, triton.next_power_of_2(kv_heads))
    encode = 0 if cache.key.dtype == qkv.dtype else _largest_divisor(kv_heads, at_once)
    parts = triton.cdiv(heads, at_once) + (2 * kv_heads // encode if encode else triton.cdiv(kv_heads, at_once))
    q_weight, k_weight = (qkv, qkv) if weights is None else weights
    (k_scale, k_number), (v_scale, v_number) = map(_scale, scales)
    arguments = (
        *(qkv, q_weight, k_weight, cos_sin, positions, slots, _bits(cache.key), _bits(cache.value)),
        *(cache.key_scale, cache.value_scale, k_scale, v_scale, k_number, v_number),
        *(cache.num_blocks * size, len(slots), eps, qkv.stride(0), cos_sin.stride(0)),
        *(*cache.key.stride()[:3], *cache.value.stride()[:3]),
    )
    constants = {
        "S": size,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "AT_ONCE": at_once,
        "NORM": weights is not None,
        "ENCODE": encode,
        **_stored_as(cache if encode else None, k_scale, v_scale),
    }
    num_warps = 4 if at_once * dim >= 512 else 1
    # A fused multiply-add of halves skips a rounding that torch makes.
    _qkv((len(qkv), parts), arguments, constants, num_warps=num_warps, enable_fp_fusion=False)


def _stored_as(cache: LayerCache | None, *scales: torch.Tensor | None) -> dict[str, Any]:
    """What the kernel is compiled for where it encodes rows for a cache; None: it does not."""
    of_k, of_v = (None, None) if cache is None else cache.row_kernels
    k_strides, v_strides = (None, None) if cache is None else cache.scale_strides
    k_scales, v_scales = (0 if scale is None else len(scale) for scale in scales)
    named = {"K_FORMAT": of_k, "V_FORMAT": of_v, "K_SCALES": k_scales, "V_SCALES": v_scales}
    return {**named, "K_SCALE_STRIDES": k_strides, "V_SCALE_STRIDES": v_strides}


def _largest_divisor(number: int, most: int) -> int:
    return next(one for one in range(most, 0, -1) if number % one == 0)


def _scale(scale: Scale) -> tuple[torch.Tensor | None, float]:
    """As a tensor float32 [1] or [Hkv], or where that is None as a number."""
    return (scale.contiguous(), 1.0) if isinstance(scale, torch.Tensor) else (None, 1.0 if scale is None else scale)


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """8-bit floats as the bytes that are stored."""
    return codes.view(torch.uint8) if codes.is_floating_point() and codes.dtype.itemsize == 1 else codes


def _warps(block: int) -> int:
    """Warps that have 8 elements a thread, which is 16 bytes."""
    return min(16, max(1, block // 256))
