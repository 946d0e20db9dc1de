"""seal_blocks: encode the blocks that a step's new tokens filled, from the rows that a second cache holds of them."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError
from ..formats.base import RowFormat, check_scales
from ..formats.registry import format_of
from ..runtime.op_registry import choose, expect, load, register
from .reshape_and_cache import put_rows


def seal_blocks(
    key: torch.Tensor,
    value: torch.Tensor,
    recent_table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    kv_cache_dtype: str,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    path: str = "auto",
) -> None:
    """Store each block that a step's new tokens filled as a format that encodes whole blocks does.

    Of sequence b these are blocks (seq_lens[b] - query_len[b]) // S to seq_lens[b] // S - 1, of a format with a window
    as many blocks before: which they are follows from the lengths on the device, so that a CUDA graph may capture it.
    A block outside either cache is skipped, and doing the same again writes the same.

    Caches may have one dimension more in front, of layers whose blocks have the same ids.

    Args:
        key: [P', S, Hkv, D], the second cache, whose blocks of S tokens hold rows as the model computes them. value:
            [P', S, Hkv, Dv].
        recent_table: [B, max_blocks] int32, of blocks of that cache by the same columns as in block_table; read where a
            block is to be stored.
        key_cache, value_cache: codes [P, S, Hkv, n]. k_scale_cache, v_scale_cache: second planes [P, S or 1, Hkv, n].
        block_table: [B, max_blocks] int32. query_start_loc: [B + 1] int32. seq_lens: [B] int32, new tokens included.
        max_query_len: host upper bound.
        kv_cache_dtype: the format's name.

    Raises:
        InvalidInputError: a format that stores each token when it comes, or shapes, dtypes or strides that do not fit.
    """
    form = format_of(kv_cache_dtype)
    if not form.whole_blocks:
        expected = "a format that encodes whole blocks, as int4"
        raise InvalidInputError("kv_cache_dtype", expected, repr(form.name), "reshape_and_cache writes the others")
    if key.dim() == 4:
        key, value, key_cache, value_cache = (x[None] for x in (key, value, key_cache, value_cache))
        k_scale_cache, v_scale_cache = (None if x is None else x[None] for x in (k_scale_cache, v_scale_cache))
    for name, rows, cache, scales, kind in (
        ("key", key, key_cache, k_scale_cache, form.key),
        ("value", value, value_cache, v_scale_cache, form.value),
    ):
        _check(name, rows, cache, scales, kind)
    shape = key.shape[:4]
    expect(value.shape[:4] == shape, "value", f"{list(shape)} and Dv", value)
    count = len(seq_lens)
    for name, tensor, length in (("seq_lens", seq_lens, count), ("query_start_loc", query_start_loc, count + 1)):
        fits = tensor.dtype == torch.int32 and tensor.shape == (length,) and tensor.is_contiguous()
        expect(fits and tensor.device == key.device, name, f"int32 [{length}] on {key.device}, contiguous", tensor)
    for name, table in (("recent_table", recent_table), ("block_table", block_table)):
        fits = table.dtype == torch.int32 and table.dim() == 2 and len(table) == count and table.device == key.device
        expect(fits and table.stride(1) == 1, name, f"int32 [{count}, max_blocks] on {key.device}", table)
    lengths = (query_start_loc, seq_lens, max_query_len)
    planes = (key_cache, value_cache, k_scale_cache, v_scale_cache)
    _op(key, value, recent_table, *planes, block_table, *lengths, kv_cache_dtype, path)


def _check(name: str, rows: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, form: RowFormat) -> None:
    expect(rows.dim() == 5 and rows.stride(4) == 1, name, "[P', S, Hkv, D] or [L, P', S, Hkv, D], last stride 1", rows)
    planes = form.planes(rows.shape[4], rows.dtype)
    wanted = (len(rows), *cache.shape[1:2], *rows.shape[2:4], planes[0].width)
    fits = cache.shape == wanted and cache.dtype == planes[0].dtype and cache.stride(4) == 1
    expect(fits, f"{name}_cache", f"{planes[0].dtype} {list(wanted)}, last stride 1", cache)
    if scales is not None:
        expect(len(scales) == len(rows), f"{name[0]}_scale_cache", f"of {len(rows)} layers", scales)
    check_scales(f"{name[0]}_scale_cache", planes, None if scales is None else scales[0], cache[0])
    expect(rows.device == cache.device, name, f"on {cache.device} as the cache", rows)


def _run(
    key: torch.Tensor,
    value: torch.Tensor,
    recent_table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    kv_cache_dtype: str,
    path: str,
) -> None:
    """Caches are of layers here."""
    form, columns = format_of(kv_cache_dtype), -(-max_query_len // key.shape[2])
    empty = 0 in (len(seq_lens), columns, recent_table.shape[1], block_table.shape[1], *key.shape, *key_cache.shape)
    if empty:
        return
    tables = (recent_table, block_table, query_start_loc, seq_lens)
    if choose(path, key.device) == "triton":
        tensors = (key, value, key_cache, value_cache, k_scale_cache, v_scale_cache)
        load("kernels.cache_write.block_kernel").launch(*tensors, *tables, columns, form)
        return
    sources, targets = _blocks(key[0], key_cache[0], *tables, columns, form.recent_blocks(key.shape[2]))
    if not targets.is_cuda:  # where their number needs no wait: most steps fill no block
        filled = targets >= 0
        sources, targets = sources[filled], targets[filled]
        if not len(targets):
            return
    for rows, kind, planes in (
        (key, form.key, (key_cache, k_scale_cache)),
        (value, form.value, (value_cache, v_scale_cache)),
    ):
        for layer in range(len(rows)):
            for encoded, plane in zip(kind.encode(rows[layer][sources]), planes, strict=True):
                put_rows(encoded, plane[layer][:, None], targets, 1)


def _blocks(
    key: torch.Tensor,
    key_cache: torch.Tensor,
    recent_table: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    columns: int,
    recent: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [B * columns] of the second cache to read, and of the cache to write: -1 where none is to be. recent: full
    blocks that stay as they are."""
    size, width = key.shape[1], min(recent_table.shape[1], block_table.shape[1])
    first = (seq_lens.long() - query_start_loc.long().diff()).clamp(min=0) // size - recent
    column = first[:, None] + torch.arange(columns, device=key.device)
    live = (column >= 0) & (column < seq_lens[:, None] // size - recent) & (column < width)
    column = torch.where(live, column, 0)
    source, target = (table.gather(1, column).long() for table in (recent_table, block_table))
    live &= (source >= 0) & (source < len(key)) & (target >= 0) & (target < len(key_cache))
    return torch.where(live, source, 0).flatten(), torch.where(live, target, -1).flatten()


def _fake(*args: object) -> None:
    return None


_op = register(
    "seal_blocks(Tensor key, Tensor value, Tensor recent_table, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor(c!) k_scale_cache, Tensor(d!) v_scale_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "SymInt max_query_len, str kv_cache_dtype, str path) -> ()",
    _run,
    _fake,
)
