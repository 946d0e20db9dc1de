"""Triton kernels of the small ops between a decoder's matrix products, rounding where the torch path rounds.

Each reads and writes every byte once. Elements are computed in float32 and rounded to the model's dtype after each
operation that torch would round after, so that both paths draw the same tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...pdl import PDLKernel, pdl_wait

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
    WRITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part): AT_ONCE query heads, turned in place, or as many key and value heads, to the cache; where
    it does not WRITE, keys are turned in place too."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    KIND: tl.constexpr = qkv.dtype.element_ty
    cos = cos_sin + tl.load(positions + token).to(tl.int64) * stride_angle
    dim = tl.arange(0, HALF)  # [HALF]
    row = qkv + token * stride_row
    if part < QUERY_PARTS:
        head = part * AT_ONCE + tl.arange(0, AT_ONCE)  # [heads]
        _turn_in_place(row + head * D, q_weight, cos, head < HEADS, eps, D, HALF, NORM)
    elif not WRITE:
        head = (part - QUERY_PARTS) * AT_ONCE + tl.arange(0, AT_ONCE)
        _turn_in_place(row + (HEADS + head) * D, k_weight, cos, head < KV_HEADS, eps, D, HALF, NORM)
    else:
        slot = tl.load(slots + token, mask=token < num_written, other=-1)
        if (slot >= 0) & (slot < num_slots):
            head = (part - QUERY_PARTS) * AT_ONCE + tl.arange(0, AT_ONCE)
            live = head < KV_HEADS
            mask = live[:, None] & (dim < D // 2)[None, :]
            keys = row + HEADS * D
            first, second = _turned(keys + head * D, k_weight, cos, cos + D // 2, live, eps, D, HALF, NORM)
            block, offset, wide = slot // S, slot % S, head.to(tl.int64)  # a stride may be past 2**31 elements
            target = key_cache + block * sk_b + offset * sk_s + (wide * sk_h)[:, None] + dim[None, :]
            tl.store(target, first.to(KIND), mask=mask)
            tl.store(target + D // 2, second.to(KIND), mask=mask)
            values = keys + KV_HEADS * D + (head * D)[:, None] + dim[None, :]
            target = value_cache + block * sv_b + offset * sv_s + (wide * sv_h)[:, None] + dim[None, :]
            tl.store(target, tl.load(values, mask=mask), mask=mask)
            tl.store(target + D // 2, tl.load(values + D // 2, mask=mask), mask=mask)


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
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    write: bool = True,
) -> None:
    """As `fused_ops.turn_and_write`, a few heads of a token per program. Unless it is to `write`, the cache is left as
    it is, and keys are turned in place as queries are."""
    (num_blocks, size, kv_heads, _), dim = key_cache.shape, cos_sin.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    at_once = min(8, triton.next_power_of_2(kv_heads))
    parts = triton.cdiv(heads, at_once) + triton.cdiv(kv_heads, at_once)
    q_weight, k_weight = (qkv, qkv) if weights is None else weights
    arguments = (
        *(qkv, q_weight, k_weight, cos_sin, positions, slots, key_cache, value_cache),
        *(num_blocks * size, len(slots), eps, qkv.stride(0), cos_sin.stride(0)),
        *(*key_cache.stride()[:3], *value_cache.stride()[:3]),
    )
    constants = {
        "S": size,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "AT_ONCE": at_once,
        "NORM": weights is not None,
        "WRITE": write,
    }
    num_warps = 4 if at_once * dim >= 512 else 1
    # A fused multiply-add of halves skips a rounding that torch makes.
    _qkv((len(qkv), parts), arguments, constants, num_warps=num_warps, enable_fp_fusion=False)


def _warps(block: int) -> int:
    """Warps that have 8 elements a thread, which is 16 bytes."""
    return min(16, max(1, block // 256))
