"""reshape_and_cache: write new keys and values into their slots of a paged cache."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError
from .library import choose, expect, kernels, register


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    path: str = "auto",
) -> None:
    """Write row t of `key` and `value` to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Only the first len(slot_mapping) rows are read: rows past that are padding. Two rows with one slot are undefined.

    Args:
        key: [T', Hkv, D], last dimension contiguous. value: [T', Hkv, Dv], or None where values are a view of keys.
        key_cache: [P, S, Hkv, D], any strides but a contiguous last dimension. value_cache: [P, S, Hkv, Dv].
        slot_mapping: [n] int64, n <= T'.

    Raises:
        InvalidInputError: shapes, dtypes or strides that do not fit each other.
    """
    _check(key, key_cache, slot_mapping, "key")
    if (value is None) != (value_cache is None):
        raise InvalidInputError("value", "given exactly where there is a value_cache", "one of them only")
    if value is not None and value_cache is not None:
        _check(value, value_cache, slot_mapping, "value")
        expect(value_cache.shape[:3] == key_cache.shape[:3], "value_cache", f"{list(key_cache.shape[:3])}", value_cache)
    _op(key, value, key_cache, value_cache, slot_mapping, path)


def _check(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, name: str) -> None:
    expect(slots.dim() == 1 and slots.dtype == torch.int64, "slot_mapping", "int64 [n]", slots)
    expect(cache.dim() == 4 and cache.stride(3) == 1, f"{name}_cache", "[P, S, Hkv, D], last stride 1", cache)
    fits = rows.dim() == 3 and rows.shape[1:] == cache.shape[2:] and rows.dtype == cache.dtype
    kind = f"{str(cache.dtype).removeprefix('torch.')} [T, {cache.shape[2]}, {cache.shape[3]}], last stride 1"
    expect(fits and (rows.stride(2) == 1 or rows.shape[2] == 1), name, kind, rows)
    expect(len(rows) >= len(slots), name, f"at least {len(slots)} rows, one per slot", rows)
    expect(rows.device == cache.device == slots.device, name, f"on {cache.device} as the cache", rows)


def _run(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    path: str,
) -> None:
    if slot_mapping.numel() == 0:
        return
    if choose(path, key.device) == "triton":
        kernels("reshape_and_cache").launch(key, value, key_cache, value_cache, slot_mapping)
        return
    _torch(key, key_cache, slot_mapping)
    if value is not None and value_cache is not None:
        _torch(value, value_cache, slot_mapping)


def _torch(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    # A skipped row repeats the write of a live one (or rewrites what slot 0 holds), so that no mask reaches the host.
    block_size = cache.shape[1]
    live = (slots >= 0) & (slots < cache.shape[0] * block_size)
    stand_in = live.int().argmax()
    source = torch.where(live, torch.arange(len(slots), device=slots.device), stand_in)
    target = torch.where(live[stand_in], slots[source], 0)
    block, offset = target // block_size, target % block_size
    values = torch.where(live[stand_in], rows[source], cache[0, 0])
    cache.index_put_((block, offset), values)


def _fake(*args: object) -> None:
    return None


_op = register(
    "reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
    "str path) -> ()",
    _run,
    _fake,
)
