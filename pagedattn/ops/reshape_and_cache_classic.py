"""The cache layout of early paged-attention kernels, to exchange caches with them: written to, and read from."""

from __future__ import annotations

import torch

from ..runtime.op_registry import choose, csrc_op, expect, register
from .reshape_and_cache import put_rows


def reshape_and_cache_classic(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    path: str = "auto",
) -> None:
    """Write row t of `key` and `value` to slot `slot_mapping[t]`; slots outside the cache are skipped.

    Keys lie in 16-byte pieces and values transposed. No attention of this library reads such a cache;
    `from_classic_layout` makes of its blocks what attention reads.

    Args:
        key, value: [T', Hkv, D], last dimension contiguous, T' >= n.
        key_cache: [P, Hkv, D / x, S, x], x = 16 / itemsize. value_cache: [P, Hkv, D, S]. Both contiguous, dtype of key.
        slot_mapping: [n] int64.

    Raises:
        InvalidInputError: shapes, dtypes or strides that do not fit each other.
    """
    expect(slot_mapping.dim() == 1 and slot_mapping.dtype == torch.int64, "slot_mapping", "int64 [n]", slot_mapping)
    whole = value_cache.dim() == 4 and value_cache.is_contiguous()
    expect(whole, "value_cache", "[P, Hkv, D, S], contiguous", value_cache)
    blocks, heads, dim, size = value_cache.shape
    group = 16 // key.element_size()
    expect(
        key_cache.shape == (blocks, heads, dim // group, size, group)
        and dim % group == 0
        and key_cache.is_contiguous(),
        "key_cache",
        f"[{blocks}, {heads}, {dim} / {group}, {size}, {group}], contiguous",
        key_cache,
    )
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        fits = rows.dim() == 3 and rows.shape[1:] == (heads, dim) and rows.dtype == cache.dtype == key.dtype
        kind = f"{str(value_cache.dtype).removeprefix('torch.')} [T, {heads}, {dim}], last stride 1"
        expect(fits and rows.stride(2) == 1 and len(rows) >= len(slot_mapping), name, kind, rows)
        same = rows.device == cache.device == slot_mapping.device
        expect(same, name, f"on {slot_mapping.device} as the slots", rows)
    _op(key, value, key_cache, value_cache, slot_mapping, path)


def from_classic_layout(
    key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of classic caches as blocks of the usual layout, by torch; fp8 caches keep their codes.

    With `blocks` a sequence's row of the block table, `key.flatten(0, 1)[:seq_len]` are its keys in order.

    Args:
        key_cache: [P, Hkv, D / x, S, x]. value_cache: [P, Hkv, Dv, S]. Any strides.
        blocks: [n] integers in [0, P), which blocks in which order; None is all of them.

    Returns:
        key [n, S, Hkv, D] and value [n, S, Hkv, Dv], contiguous copies.

    Raises:
        InvalidInputError: shapes that do not fit each other, or blocks that are no integers [n].
    """
    expect(key_cache.dim() == 5, "key_cache", "[P, Hkv, D / x, S, x]", key_cache)
    heads, size = key_cache.shape[1], key_cache.shape[3]
    fits = value_cache.dim() == 4 and value_cache.shape[:2] == key_cache.shape[:2] and value_cache.shape[3] == size
    expect(fits, "value_cache", f"[{len(key_cache)}, {heads}, Dv, {size}] as key_cache", value_cache)
    if blocks is not None:
        whole = blocks.dim() == 1 and not (blocks.is_floating_point() or blocks.dtype == torch.bool)
        expect(whole, "blocks", "integers [n]", blocks)
    key, value = (_taken(cache, blocks) for cache in (key_cache, value_cache))
    key = key.permute(0, 3, 1, 2, 4).flatten(3)
    return key.contiguous().view(key_cache.dtype), value.permute(0, 3, 1, 2).contiguous().view(value_cache.dtype)


def _taken(cache: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # as bytes: not every torch indexes fp8
        cache = cache.view(torch.uint8)
    return cache if blocks is None else cache.index_select(0, blocks.to(cache.device, torch.int64))


def _run(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    path: str,
) -> None:
    if slot_mapping.numel() == 0 or value_cache.numel() == 0:
        return
    slots = slot_mapping.contiguous()
    if choose(path, key.device, "reshape_and_cache_classic") == "csrc":
        csrc_op("reshape_and_cache_classic")(key, value, key_cache, value_cache, slots)
        return
    if key.dtype.itemsize == 1:  # as bytes: not every torch indexes fp8
        key, value, key_cache, value_cache = (x.view(torch.uint8) for x in (key, value, key_cache, value_cache))
    size = value_cache.shape[3]
    put_rows(key[: len(slots)].unflatten(2, (-1, key_cache.shape[4])), key_cache.permute(0, 3, 1, 2, 4), slots, size)
    put_rows(value[: len(slots)], value_cache.permute(0, 3, 1, 2), slots, size)


def _fake(*args: object) -> None:
    return None


_op = register(
    "reshape_and_cache_classic(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str path) -> ()",
    _run,
    _fake,
)
