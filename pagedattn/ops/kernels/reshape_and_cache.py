"""Triton: write keys and values into their slots, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._device import on_device


@triton.jit
def _write_row(
    rows, cache, token, block, offset, s_rt, s_rh, s_cb, s_cs, s_ch, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr
):
    index = tl.arange(0, N)  # [N] over heads and dims
    head, dim = index // D, index % D
    mask = index < H * D
    value = tl.load(rows + token * s_rt + head * s_rh + dim, mask=mask)
    tl.store(cache + block * s_cb + offset * s_cs + head * s_ch + dim, value, mask=mask)


@triton.jit
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
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
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        block = slot // S
        offset = slot % S
        _write_row(key, key_cache, token, block, offset, sk_t, sk_h, sck_b, sck_s, sck_h, H, D, N)
        if value is not None:
            _write_row(value, value_cache, token, block, offset, sv_t, sv_h, scv_b, scv_s, scv_h, H, DV, NV)


def launch(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Shapes as in `reshape_and_cache`; both tensors in one launch."""
    blocks, size, heads, dim = key_cache.shape
    v, vc = (key, key_cache) if value is None or value_cache is None else (value, value_cache)
    with on_device(key):
        _reshape_and_cache_kernel[(len(slot_mapping),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            blocks * size,
            *key.stride()[:2],
            *v.stride()[:2],
            *key_cache.stride()[:3],
            *vc.stride()[:3],
            S=size,
            H=heads,
            D=dim,
            DV=v.shape[2],
            N=triton.next_power_of_2(heads * dim),
            NV=triton.next_power_of_2(heads * v.shape[2]),
            num_warps=4 if heads * dim >= 512 else 1,
        )
