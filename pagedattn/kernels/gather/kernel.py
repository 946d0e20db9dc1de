"""Triton: gather a sequence's rows out of its blocks, one program per sequence and run of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher

_TOKENS = 16


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "max_columns"])
def _gather_kv_kernel(
    cache, table, cu_lens, starts, out, num_blocks, num_rows, max_columns, s_table, s_column, s_block, s_slot, s_head,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    begin = tl.load(cu_lens + seq)
    end = tl.minimum(tl.load(cu_lens + seq + 1), num_rows)
    first = 0
    if starts is not None:
        first = tl.load(starts + seq)
    index = tl.arange(0, N)  # [N] over heads and dims
    head, dim = (index // D).to(tl.int64), index % D  # a stride may be past 2**31 elements
    for base in range(begin + tl.program_id(1) * TOKENS, end, tl.num_programs(1) * TOKENS):
        for step in tl.static_range(TOKENS):
            row = base + step
            position = first + row - begin
            column = position // S
            known = (row < end) & (position >= 0) & (column < max_columns)
            entry = table + seq * tl.cast(s_table, tl.int64) + column * s_column
            block = tl.load(entry, mask=known, other=-1).to(tl.int64)
            live = (block >= 0) & (block < num_blocks)
            source = cache + block * s_block + (position % S).to(tl.int64) * s_slot + head * s_head + dim
            value = tl.load(source, mask=live & (index < H * D), other=0.0)
            tl.store(out + row.to(tl.int64) * (H * D) + index, value, mask=(row < end) & (index < H * D))


_launch = Launcher(_gather_kv_kernel)


def launch(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_lens: torch.Tensor,
    starts: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out: [num_tokens, Hkv, D] contiguous, zeroed."""
    if cache.dtype.itemsize == 1:  # as bytes: Triton has e4m3 on new GPUs only
        cache, out = cache.view(torch.uint8), out.view(torch.uint8)
    blocks, size, heads, dim = cache.shape
    runs = triton.cdiv(len(out), len(block_table) * _TOKENS)
    sizes_and_strides = (blocks, len(out), block_table.shape[1], *block_table.stride(), *cache.stride()[:3])
    constants = {"S": size, "H": heads, "D": dim, "N": triton.next_power_of_2(heads * dim), "TOKENS": _TOKENS}
    with on_device(cache):
        arguments = (cache, block_table, cu_lens, starts, out, *sizes_and_strides)
        _launch((len(block_table), min(runs * 2, 256)), arguments, constants)
