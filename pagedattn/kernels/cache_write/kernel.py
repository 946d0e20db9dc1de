"""Triton: write keys and values into their slots as a cache format stores them, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.base import CacheFormat, RowFormat, plane_strides
from ...formats.native.format import ROWS as NATIVE_ROWS
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.target import target_of


@triton.jit(do_not_specialize=["num_slots"])
def _reshape_and_cache_kernel(
    key, value, key_cache, value_cache, slots, k_scale, v_scale, k_scale_value, v_scale_value, num_slots, sk_t, sk_h,
    sv_t, sv_h, sck_b, sck_s, sck_h, scv_b, scv_s, scv_h, k_scale_cache, v_scale_cache, S: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_SCALE_STRIDES: tl.constexpr, V_SCALE_STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # attention may be launched meanwhile; before what it reads of the cache it waits for this kernel's end
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        block = slot // S
        offset = slot % S
        K_FORMAT.write_row(
            key, key_cache, k_scale_cache, k_scale, k_scale_value, sk_t, sk_h, sck_b, sck_s, sck_h,
            token, block, offset, K_SCALE_STRIDES, H, D, K_SCALES,
        )  # fmt: skip
        if value is not None:
            V_FORMAT.write_row(
                value, value_cache, v_scale_cache, v_scale, v_scale_value, sv_t, sv_h, scv_b, scv_s, scv_h,
                token, block, offset, V_SCALE_STRIDES, H, DV, V_SCALES,
            )  # fmt: skip


# What differs from layer to layer of a step.
_launch = Launcher(
    _reshape_and_cache_kernel,
    (
        *("key", "value", "key_cache", "value_cache", "slots", "k_scale", "v_scale", "k_scale_value", "v_scale_value"),
        *("k_scale_cache", "v_scale_cache"),
    ),
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
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    form: CacheFormat,
) -> None:
    """Shapes as in `reshape_and_cache`; both tensors in one launch. A scale tensor, where there is one, is 1-D."""
    blocks, size, heads, _ = key_cache.shape
    dim = key.shape[2]
    v, vc = (key, key_cache) if value is None or value_cache is None else (value, value_cache)
    arguments = (
        *(_bits(key), None if value is None else _bits(value)),
        *(_bits(key_cache), None if value_cache is None else _bits(value_cache)),
        *(slot_mapping, k_scale, v_scale, k_scale_value, v_scale_value, blocks * size),
        *(*key.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *vc.stride()[:3]),
        *(k_scale_cache, v_scale_cache),
    )
    constants = {
        "S": size,
        "H": heads,
        "D": dim,
        "DV": v.shape[2],
        "K_SCALES": 0 if k_scale is None else len(k_scale),
        "V_SCALES": 0 if v_scale is None else len(v_scale),
        "K_FORMAT": _as_written(form.key, key, key_cache).kernels,
        "V_FORMAT": _as_written(form.value, v, vc).kernels,
        "K_SCALE_STRIDES": plane_strides(k_scale_cache),
        "V_SCALE_STRIDES": plane_strides(v_scale_cache),
        "PDL": target_of(key.device).supports_pdl,
    }
    with on_device(key):
        _launch((len(slot_mapping),), arguments, constants, num_warps=4 if heads * dim >= 512 else 1)


def _as_written(rows: RowFormat, new: torch.Tensor, cache: torch.Tensor) -> RowFormat:
    """The format of the cache; rows that come in its dtype are copied."""
    return NATIVE_ROWS if new.dtype == cache.dtype else rows


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as integers, which every Triton and GPU can load and store."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
