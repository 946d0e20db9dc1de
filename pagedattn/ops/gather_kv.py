"""gather_kv: a sequence's rows out of its blocks, packed back to back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InvalidInputError
from ..formats.base import RowFormat, check_scales, check_takes_scales
from ..formats.registry import stored_as
from ..kernels.inputs import scale_parts
from ..runtime.op_registry import choose, csrc_op, expect, load, register


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    num_tokens: int,
    *,
    starts: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    head_dims: tuple[int, int] | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    path: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows starts[b] .. starts[b] + cu_lens[b + 1] - cu_lens[b] - 1 of each sequence b, packed in order.

    Args:
        key_cache: [P, S, Hkv, D], or codes of a format [P, S, Hkv, n]. value_cache: the same of values, or None.
        block_table: [B, max_blocks] int32. cu_lens: [B + 1] int32, not falling, from 0. starts: [B] int32, zeros
            where None.
        num_tokens: rows of the result, a host integer, at least cu_lens[B]; rows past that are zero.
        dtype: None copies elements and codes as they are stored. Else rows are what their format decodes, in this
            dtype, which the arguments that follow are for; the cache alone is read, where a format of whole blocks has
            no rows of open ones. A format decodes in torch, in float32.
        head_dims: D and Dv; None: as many as there are codes, which formats that pack them do not say.
        k_scale, v_scale: of fp8 caches, a float, or float32 [1] or [Hkv]; None is 1.
        kv_cache_dtype: the name of the cache's format; "auto": as its dtype says.
        k_scale_cache, v_scale_cache: planes [P, S or 1, Hkv, n] of a format that keeps scales of its own.

    Returns:
        key [num_tokens, Hkv, D] and value [num_tokens, Hkv, Dv] (None where there is no value_cache). A row past the
        table or in a block outside the cache is zero.

    Raises:
        InvalidInputError: wrong ranks, lengths, dtypes, devices, planes or scales.
    """
    expect(key_cache.dim() == 4 and key_cache.stride(3) == 1, "key_cache", "[P, S, Hkv, D], last stride 1", key_cache)
    table_ok = block_table.dim() == 2 and block_table.dtype == torch.int32
    expect(table_ok, "block_table", "int32 [B, max_blocks]", block_table)
    _check_per_sequence(cu_lens, "cu_lens", len(block_table) + 1, "int32 [B + 1]")
    if value_cache is not None:
        expect(value_cache.dim() == 4 and value_cache.stride(3) == 1, "value_cache", "as key_cache", value_cache)
    if starts is not None:
        _check_per_sequence(starts, "starts", len(block_table), "int32 [B]")
    others = {"value_cache": value_cache, "block_table": block_table, "cu_lens": cu_lens, "starts": starts}
    for name, tensor in others.items():
        if tensor is not None:
            expect(tensor.device == key_cache.device, name, f"on {key_cache.device} as key_cache", tensor)

    def gather(plane: torch.Tensor) -> torch.Tensor:
        return _op(plane, block_table, cu_lens, starts, num_tokens, path)

    if dtype is None:
        return gather(key_cache), None if value_cache is None else gather(value_cache)
    form = stored_as(kv_cache_dtype, key_cache.dtype)
    check_takes_scales(form, k_scale, v_scale)
    dims = head_dims or (key_cache.shape[3], 0 if value_cache is None else value_cache.shape[3])
    key = _decoded(gather, "key", form.key, key_cache, k_scale_cache, k_scale, dims[0], dtype)
    if value_cache is None:
        return key, None
    return key, _decoded(gather, "value", form.value, value_cache, v_scale_cache, v_scale, dims[1], dtype)


def _decoded(
    gather: Callable[[torch.Tensor], torch.Tensor],
    name: str,
    form: RowFormat,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float | torch.Tensor | None,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    planes = form.planes(dim, cache.dtype if cache.dtype.is_floating_point else torch.float32)  # codes are no elements
    if (planes[0].dtype, planes[0].width) != (cache.dtype, cache.shape[3]):
        expected = f"{planes[0].dtype} [P, S, Hkv, {planes[0].width}], as {form.name!r} stores {dim} elements"
        got = f"{cache.dtype} {list(cache.shape)}"
        raise InvalidInputError(f"{name}_cache", expected, got, "pass kv_cache_dtype= and head_dims=")
    check_scales(f"{name[0]}_scale_cache", planes, scales, cache)
    gathered = [gather(cache)]
    if scales is not None:  # of a block the same for all its rows
        gathered.append(gather(scales.expand(-1, cache.shape[1], -1, -1)))
    wide = torch.promote_types(dtype, torch.float32)
    rows = form.decode(gathered, dim, wide)
    if scale is not None:
        of_heads, factor = scale_parts(f"{name[0]}_scale", scale, cache.shape[2], cache.device)
        rows = rows * (factor if of_heads is None else of_heads[:, None])
    return rows.to(dtype)


def _check_per_sequence(tensor: torch.Tensor, name: str, count: int, expected: str) -> None:
    fits = tensor.dim() == 1 and tensor.dtype == torch.int32 and len(tensor) == count
    expect(fits, name, expected, tensor)


def _run(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor | None,
    num_tokens: int,
    path: str,
) -> torch.Tensor:
    shape, kind = (num_tokens, *cache.shape[2:]), {"dtype": cache.dtype, "device": cache.device}
    if num_tokens == 0 or block_table.numel() == 0 or cache.numel() == 0:
        return torch.zeros(shape, **kind)
    chosen = choose(path, cache.device, "gather_kv")
    lens, first = cu_lens.contiguous(), None if starts is None else starts.contiguous()
    if chosen == "csrc":
        out = torch.empty(shape, **kind)
        csrc_op("gather_kv")(cache, block_table, lens, first, out)
        return out
    out = torch.zeros(shape, **kind)
    if chosen == "triton":
        load("kernels.gather.kernel").launch(cache, block_table, lens, first, out)
    else:
        _torch(cache, block_table, lens, first, out)
    return out


def _torch(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    if cache.dtype.itemsize == 1:  # as bytes: not every torch indexes fp8
        cache, out = cache.view(torch.uint8), out.view(torch.uint8)
    token = torch.arange(len(out), device=cache.device)
    ends = cu_lens.long()
    seq = torch.searchsorted(ends[1:], token, right=True).clamp_(max=len(block_table) - 1)
    position = token - ends[seq] + (0 if starts is None else starts.long()[seq])
    column = position // cache.shape[1]
    live = (token < ends[-1]) & (position >= 0) & (column < block_table.shape[1])
    block = block_table[seq, torch.where(live, column, 0)].long()
    live &= (block >= 0) & (block < len(cache))
    rows = cache[torch.where(live, block, 0), torch.where(live, position % cache.shape[1], 0)]
    out.copy_(torch.where(live[:, None, None], rows, out))


def _fake(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor | None,
    num_tokens: int,
    path: str,
) -> torch.Tensor:
    return cache.new_empty(num_tokens, *cache.shape[2:])


_op = register(
    "gather_kv(Tensor cache, Tensor block_table, Tensor cu_lens, Tensor? starts, SymInt num_tokens, str path)"
    " -> Tensor",
    _run,
    _fake,
)
