"""gather_kv: a sequence's rows out of its blocks, packed back to back."""

from __future__ import annotations

import torch

from ..runtime.op_registry import choose, csrc_op, expect, load, register


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    num_tokens: int,
    *,
    starts: torch.Tensor | None = None,
    path: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows starts[b] .. starts[b] + cu_lens[b + 1] - cu_lens[b] - 1 of each sequence b, packed in order.

    Args:
        key_cache: [P, S, Hkv, D]. value_cache: [P, S, Hkv, Dv] or None.
        block_table: [B, max_blocks] int32. cu_lens: [B + 1] int32, not falling, from 0. starts: [B] int32, zeros
            where None.
        num_tokens: rows of the result, a host integer, at least cu_lens[B]; rows past that are zero.

    Returns:
        key [num_tokens, Hkv, D] and value [num_tokens, Hkv, Dv] (None where there is no value_cache). A row past the
        table or in a block outside the cache is zero.

    Raises:
        InvalidInputError: wrong ranks, lengths, dtypes or devices.
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
    key = _op(key_cache, block_table, cu_lens, starts, num_tokens, path)
    return key, None if value_cache is None else _op(value_cache, block_table, cu_lens, starts, num_tokens, path)


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
