"""reshape_and_cache: write new keys and values into their slots of a paged cache."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import InvalidInputError
from ..formats.base import RowFormat, check_scales, check_takes_scales
from ..formats.fp8.format import POSITIVE_SCALE, is_scale
from ..formats.native.format import NATIVE
from ..formats.registry import stored_as
from ..runtime.op_registry import choose, csrc_op, expect, load, refuse, register

WIDE = (torch.float16, torch.bfloat16, torch.float32)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    path: str = "auto",
) -> None:
    """Write row t of `key` and `value` to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Only the first len(slot_mapping) rows are read: rows past that are padding. Two rows with one slot are undefined.
    A cache of the rows' dtype stores them as they are. An fp8 cache stores row / scale, rounded to nearest even and
    saturated at +-448 (e4m3) or +-57344 (e5m2), infinities too; NaN stays NaN. Other formats say so themselves
    (`pagedattn/formats`), and what they make of infinities and NaN is undefined.

    Args:
        key: [T', Hkv, D], last dimension contiguous. value: [T', Hkv, Dv], or None where values are a view of keys.
        key_cache: [P, S, Hkv, D], any strides but a contiguous last dimension. value_cache: [P, S, Hkv, Dv]. Of formats
            that pack codes, last dimensions are narrower.
        slot_mapping: [n] int64, n <= T'.
        k_scale, v_scale: of fp8 caches: None for 1, a positive float, or float32 [1] or [Hkv] on the cache's device.
        kv_cache_dtype: the name of the cache's format; "auto": as its dtype says.
        k_scale_cache, v_scale_cache: planes [P, S or 1, Hkv, n] of a format that keeps scales of its own.

    Raises:
        InvalidInputError: shapes, dtypes, strides or scales that do not fit each other, or a format of whole blocks.
    """
    form = stored_as(kv_cache_dtype, key_cache.dtype)
    if form.latent_only:
        remedy = "write latent rows by concat_and_cache_mla"
        raise InvalidInputError("kv_cache_dtype", "a format of keys and values", repr(form.name), remedy)
    if form.whole_blocks:
        expected = "a format that stores each token when it comes"
        remedy = "write to a cache of kv_cache_dtype='auto' (LayerCache.recent), then seal_blocks"
        raise InvalidInputError("kv_cache_dtype", expected, repr(form.name), remedy)
    if key.dtype == torch.float64 and form is not NATIVE:  # codes keep none of the digits that float32 lacks
        key, value = key.float(), None if value is None else value.float()
    _check(key, key_cache, k_scale_cache, slot_mapping, form.key, "key")
    if (value is None) != (value_cache is None):
        raise InvalidInputError("value", "given exactly where there is a value_cache", "one of them only")
    if value is not None and value_cache is not None:
        _check(value, value_cache, v_scale_cache, slot_mapping, form.value, "value")
        if value_cache.shape[:3] != key_cache.shape[:3]:
            refuse("value_cache", f"{list(key_cache.shape[:3])} and Dv", value_cache)
    check_takes_scales(form, k_scale, v_scale)
    k_tensor, k_value = split_scale(k_scale, key, key_cache, "k_scale")
    v_tensor, v_value = (None, 1.0) if value is None else split_scale(v_scale, value, value_cache, "v_scale")
    stored = (k_scale_cache, v_scale_cache, kv_cache_dtype)
    _op(key, value, key_cache, value_cache, slot_mapping, k_tensor, v_tensor, k_value, v_value, *stored, path)


def _check(
    rows: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor,
    form: RowFormat,
    name: str,
) -> None:
    # No `expect` here: its texts would be made at every call, of every layer.
    if slots.dim() != 1 or slots.dtype != torch.int64:
        refuse("slot_mapping", "int64 [n]", slots)
    if cache.dim() != 4 or cache.stride(3) != 1:
        refuse(f"{name}_cache", "[P, S, Hkv, D], last stride 1", cache)
    if rows.dim() != 3 or rows.shape[1] != cache.shape[2] or (rows.stride(2) != 1 and rows.shape[2] != 1):
        _refuse_rows(rows, cache, form, name)
    planes = form.planes(rows.shape[2], rows.dtype)
    codes = planes[0]
    copied = rows.dtype == cache.dtype and len(planes) == 1  # elements in the cache's dtype, whatever its format
    encoded = rows.dtype in WIDE and codes.dtype == cache.dtype
    if not (copied or encoded) or cache.shape[3] != (rows.shape[2] if copied else codes.width):
        _refuse_rows(rows, cache, form, name)
    check_scales(f"{name[0]}_scale_cache", planes, scales, cache)
    if rows.shape[0] < slots.shape[0]:
        refuse(name, f"at least {len(slots)} rows, one per slot", rows)
    if not (rows.device == cache.device == slots.device):
        refuse(name, f"on {cache.device} as the cache", rows)


def _refuse_rows(rows: torch.Tensor, cache: torch.Tensor, form: RowFormat, name: str) -> NoReturn:
    dtypes = dict.fromkeys((cache.dtype,) if form is NATIVE.key else (*WIDE, cache.dtype))
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    packed = form.planes(cache.shape[3], torch.float32)[0].width != cache.shape[3]
    shape = f"[T, {cache.shape[2]}, {'D' if packed else cache.shape[3]}]"
    refuse(name, f"{names} {shape}, last stride 1", rows)


def split_scale(
    scale: float | torch.Tensor | None, rows: torch.Tensor | None, cache: torch.Tensor | None, name: str
) -> tuple[torch.Tensor | None, float]:
    """The scale of an fp8 cache as a tensor or, where that is None, as a number; 1.0 is none.

    Raises:
        InvalidInputError: no positive number, no such tensor, or rows that are stored as they are.
    """
    if scale is None:
        return None, 1.0
    if rows is None or cache is None or rows.dtype == cache.dtype:
        expected = "None, as rows are stored as they are in a cache of their own dtype"
        raise InvalidInputError(name, expected, scale, "give no scale, or a cache of kv_cache_dtype='fp8_e4m3'")
    if not isinstance(scale, torch.Tensor):
        if not is_scale(scale):
            raise InvalidInputError(name, "a positive finite number as a float32", scale, POSITIVE_SCALE)
        return None, float(scale)
    heads = cache.shape[2]
    fits = scale.dtype == torch.float32 and (scale.numel() == 1 or scale.shape == (heads,))
    shapes = "[1]" if heads == 1 else f"[1] or [{heads}]"
    expect(fits and scale.device == cache.device, name, f"float32 {shapes} on {cache.device}", scale)
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
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    kv_cache_dtype: str,
    path: str,
) -> None:
    if slot_mapping.numel() == 0:
        return
    form = stored_as(kv_cache_dtype, key_cache.dtype)
    if value_cache is not None and value_cache.numel() == 0:
        value = value_cache = None
    if key_cache.numel() == 0:
        if value is not None and value_cache is not None:
            only = (v_scale, None, v_scale_value, 1.0, v_scale_cache, None, kv_cache_dtype)
            _run(value, None, value_cache, None, slot_mapping, *only, path)
        return
    chosen, slots = choose(path, key.device, "reshape_and_cache" if form.has_csrc else ""), slot_mapping.contiguous()
    if chosen == "torch":
        put_encoded(key, key_cache, k_scale_cache, slots, k_scale, k_scale_value, form.key)
        if value is not None and value_cache is not None:
            put_encoded(value, value_cache, v_scale_cache, slots, v_scale, v_scale_value, form.value)
        return
    tensors = (key, value, key_cache, value_cache, slots, k_scale, v_scale, k_scale_value, v_scale_value)
    if chosen == "csrc":
        csrc_op("reshape_and_cache")(*tensors)
    else:
        load("kernels.cache_write.kernel").launch(*tensors, k_scale_cache, v_scale_cache, form)


def put_encoded(
    rows: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor,
    scale: torch.Tensor | None,
    scale_value: float,
    form: RowFormat,
) -> None:
    """Write the first len(slots) rows [T, Hkv, D] to their slots by torch, encoded but where they are of the cache's
    dtype. scale: float32 [1] or [Hkv]; None: scale_value."""
    rows = rows[: len(slots)]
    if rows.dtype == cache.dtype:
        form = NATIVE.key
    elif scale is None and form.takes_scale:  # as a tensor: torch multiplies CUDA tensors by the reciprocal of a number
        scale = torch.full((1,), scale_value, dtype=torch.float32, device=rows.device)
    for stored, plane in zip(form.encode(rows, scale), (cache, scales), strict=False):
        if plane is None:
            continue
        if plane.dtype.itemsize == 1:  # as bytes: not every torch indexes fp8
            stored, plane = stored.view(torch.uint8), plane.view(torch.uint8)
        put_rows(stored, plane, slots, cache.shape[1])


def put_rows(rows: torch.Tensor, plane: torch.Tensor, slots: torch.Tensor, block_size: int) -> None:
    """Write rows [n, ...] to their slots of a plane [P, S or 1, ...], by torch and without a look at the slots' values.

    A skipped row repeats the write of a live one, or rewrites what slot 0 holds: no mask reaches the host.
    """
    live = (slots >= 0) & (slots < plane.shape[0] * block_size)
    some, stand_in = live.any(), live.int().argmax()
    source = torch.where(live, torch.arange(len(slots), device=slots.device), stand_in)
    target = torch.where(some, slots[source], 0)
    values = torch.where(some, rows[source], plane[0, 0])
    within = target % block_size if plane.shape[1] == block_size else torch.zeros_like(target)
    plane.index_put_((target // block_size, within), values)


def _fake(*args: object) -> None:
    return None


_op = register(
    "reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale, float k_scale_value, float v_scale_value, Tensor(c!)? k_scale_cache, "
    "Tensor(d!)? v_scale_cache, str kv_cache_dtype, str path) -> ()",
    _run,
    _fake,
)
