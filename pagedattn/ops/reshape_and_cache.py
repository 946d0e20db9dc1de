"""reshape_and_cache: write new keys and values into their slots of a paged cache."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError
from ..formats.fp8 import FP8, is_scale
from ..runtime.op_registry import choose, csrc_op, expect, load, refuse, register

_WIDE = (torch.float16, torch.bfloat16, torch.float32)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    path: str = "auto",
) -> None:
    """Write row t of `key` and `value` to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Only the first len(slot_mapping) rows are read: rows past that are padding. Two rows with one slot are undefined.
    A cache of the rows' dtype stores them as they are. An fp8 cache stores row / scale, rounded to nearest even and
    saturated at +-448 (e4m3) or +-57344 (e5m2), infinities too; NaN stays NaN.

    Args:
        key: [T', Hkv, D], last dimension contiguous. value: [T', Hkv, Dv], or None where values are a view of keys.
        key_cache: [P, S, Hkv, D], any strides but a contiguous last dimension. value_cache: [P, S, Hkv, Dv].
        slot_mapping: [n] int64, n <= T'.
        k_scale, v_scale: of fp8 caches: None for 1, a positive float, or float32 [1] or [Hkv] on the cache's device.

    Raises:
        InvalidInputError: shapes, dtypes, strides or scales that do not fit each other.
    """
    if key.dtype == torch.float64 and key_cache.dtype in FP8:  # fp8 keeps none of the digits that float32 lacks
        key, value = key.float(), None if value is None else value.float()
    _check(key, key_cache, slot_mapping, "key")
    if (value is None) != (value_cache is None):
        raise InvalidInputError("value", "given exactly where there is a value_cache", "one of them only")
    if value is not None and value_cache is not None:
        _check(value, value_cache, slot_mapping, "value")
        if value_cache.shape[:3] != key_cache.shape[:3]:
            refuse("value_cache", f"{list(key_cache.shape[:3])} and Dv", value_cache)
    k_tensor, k_value = _scale(k_scale, key, key_cache, "k_scale")
    v_tensor, v_value = (None, 1.0) if value is None else _scale(v_scale, value, value_cache, "v_scale")
    _op(key, value, key_cache, value_cache, slot_mapping, k_tensor, v_tensor, k_value, v_value, path)


def _check(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, name: str) -> None:
    # No `expect` here: its texts would be made at every call, of every layer.
    if slots.dim() != 1 or slots.dtype != torch.int64:
        refuse("slot_mapping", "int64 [n]", slots)
    if cache.dim() != 4 or cache.stride(3) != 1:
        refuse(f"{name}_cache", "[P, S, Hkv, D], last stride 1", cache)
    storable = rows.dtype == cache.dtype or (cache.dtype in FP8 and rows.dtype in _WIDE)
    whole = rows.dim() == 3 and rows.shape[1:] == cache.shape[2:] and (rows.stride(2) == 1 or rows.shape[2] == 1)
    if not (storable and whole):
        dtypes = (*_WIDE, cache.dtype) if cache.dtype in FP8 else (cache.dtype,)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(name, f"{names} [T, {cache.shape[2]}, {cache.shape[3]}], last stride 1", rows)
    if rows.shape[0] < slots.shape[0]:
        refuse(name, f"at least {len(slots)} rows, one per slot", rows)
    if not (rows.device == cache.device == slots.device):
        refuse(name, f"on {cache.device} as the cache", rows)


def _scale(
    scale: float | torch.Tensor | None, rows: torch.Tensor | None, cache: torch.Tensor | None, name: str
) -> tuple[torch.Tensor | None, float]:
    """The scale as a tensor or, where that is None, as a number; 1.0 is none."""
    if scale is None:
        return None, 1.0
    if rows is None or cache is None or rows.dtype == cache.dtype:
        raise InvalidInputError(name, "None where nothing is converted to fp8", scale, "copies have no scale")
    if not isinstance(scale, torch.Tensor):
        if not is_scale(scale):
            raise InvalidInputError(name, "a positive finite number as a float32", scale)
        return None, float(scale)
    heads = cache.shape[2]
    fits = scale.dtype == torch.float32 and (scale.numel() == 1 or scale.shape == (heads,))
    expect(fits and scale.device == cache.device, name, f"float32 [1] or [{heads}] on {cache.device}", scale)
    return scale.reshape(-1).contiguous(), 1.0


def _run(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_value: float,
    v_scale_value: float,
    path: str,
) -> None:
    if slot_mapping.numel() == 0:
        return
    if value_cache is not None and value_cache.numel() == 0:
        value = value_cache = None
    if key_cache.numel() == 0:
        if value is not None and value_cache is not None:
            _run(value, None, value_cache, None, slot_mapping, v_scale, None, v_scale_value, 1.0, path)
        return
    chosen, slots = choose(path, key.device, "reshape_and_cache"), slot_mapping.contiguous()
    if chosen == "torch":
        _torch(key, key_cache, slots, k_scale, k_scale_value)
        if value is not None and value_cache is not None:
            _torch(value, value_cache, slots, v_scale, v_scale_value)
        return
    write = csrc_op("reshape_and_cache") if chosen == "csrc" else load("kernels.cache_write.kernel").launch
    write(key, value, key_cache, value_cache, slots, k_scale, v_scale, k_scale_value, v_scale_value)


def _torch(
    rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, scale_value: float
) -> None:
    stored = rows[: len(slots)]
    if rows.dtype != cache.dtype:
        if scale is None:  # as a tensor of the device: torch multiplies CUDA tensors by the reciprocal of a number
            scale = torch.full((1,), scale_value, dtype=torch.float32, device=rows.device)
        most = FP8[cache.dtype]
        stored = (stored.float() / scale[:, None]).clamp(-most, most).to(cache.dtype)
    if cache.dtype in FP8:  # as bytes: not every torch indexes fp8
        stored, cache = stored.view(torch.uint8), cache.view(torch.uint8)
    put_rows(stored, cache, slots)


def put_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [n, ...] to their slots of cache [P, S, ...], by torch and without a look at the slots' values.

    A skipped row repeats the write of a live one, or rewrites what slot 0 holds: no mask reaches the host.
    """
    block_size = cache.shape[1]
    live = (slots >= 0) & (slots < cache.shape[0] * block_size)
    some, stand_in = live.any(), live.int().argmax()
    source = torch.where(live, torch.arange(len(slots), device=slots.device), stand_in)
    target = torch.where(some, slots[source], 0)
    values = torch.where(some, rows[source], cache[0, 0])
    cache.index_put_((target // block_size, target % block_size), values)


def _fake(*args: object) -> None:
    return None


_op = register(
    "reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale, float k_scale_value, float v_scale_value, str path) -> ()",
    _run,
    _fake,
)
