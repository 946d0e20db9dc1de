"""WriteReplay: a cache write made again by a step's other layers, without a look at their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..runtime.op_registry import load

if TYPE_CHECKING:
    from ..runtime.launcher import Launch

SCALES = (2.0**-150, 2.0**128 - 2.0**103)  # what lies between is a positive finite float32 when rounded
Scale = float | torch.Tensor | None
# (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale) -> False where nothing was written, and the op
# itself is to be called. Rows may be flat, [T', Hkv * D]; tensors of scales are contiguous.
WriteReplay = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor, Scale, Scale], bool
]


def launch_again(launch: Launch | None) -> WriteReplay | None:
    """By the Triton kernel; None where the launch cannot be made again."""
    if launch is None or not launch.repeatable():
        return None
    replay = load("runtime.launcher").Replay([launch])

    def write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale) -> bool:  # type: ignore[no-untyped-def]
        k, kc, slots = key.data_ptr(), key_cache.data_ptr(), slot_mapping.data_ptr()
        v, vc = (0, 0) if value is None else (value.data_ptr(), value_cache.data_ptr())
        addresses = k | kc | slots | v | vc
        if k_scale is None and v_scale is None:
            return replay(addresses, (k, v, kc, vc, slots, None, None, 1.0, 1.0))
        if not (_valid(k_scale) and _valid(v_scale)):
            return False
        (k_address, k_number), (v_address, v_number) = scale_values(k_scale), scale_values(v_scale)
        values = (k, v, kc, vc, slots, k_address, v_address, k_number, v_number)
        return replay(addresses | k_address | v_address, values)

    return write


def call_again(op: Callable[..., object], heads: int, dim: int, dim_v: int) -> WriteReplay:
    """By the extension's op, which takes rows [T', heads, dim]."""

    def write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale) -> bool:  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            with torch.no_grad():
                return write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
        if key.dim() == 2:
            key = key.view(-1, heads, dim)
        if value is not None and value.dim() == 2:
            value = value.view(-1, heads, dim_v)
        if k_scale is None and v_scale is None:
            op(key, value, key_cache, value_cache, slot_mapping, None, None, 1.0, 1.0)
            return True
        if not (_valid(k_scale) and _valid(v_scale)):
            return False
        tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in (k_scale, v_scale)]
        numbers = scale_values(k_scale)[1], scale_values(v_scale)[1]
        op(key, value, key_cache, value_cache, slot_mapping, *tensors, *numbers)
        return True

    return write


def scale_values(scale: Scale) -> tuple[int, float]:
    """A scale's address (0 where it is no tensor) and its number (1.0 where it is none)."""
    if isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 1.0
    return 0, 1.0 if scale is None else float(scale)


def _valid(scale: Scale) -> bool:
    return scale is None or isinstance(scale, torch.Tensor) or SCALES[0] < scale < SCALES[1]
