"""Triton: a copy of what sequences have in a cache of rotated rows, as int8 with a scale each, with a block table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.base import plane_strides
from ...formats.int8.format import INT8
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..inputs import VARYING, AttentionInputs
from ..planes import scale_rows
from .plan import num_warps
from .tokens import tokens_of


@triton.jit
def _copy_rows(
    codes, scales, to_codes, to_scales, block, slot, head, row, seen, known, s_b, s_s, s_h, D: tl.constexpr,
    BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Keys or values of tokens [TOKENS] to rows of the copy; zeros where no query sees them, which may not be encoded
    yet."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    scale_row = scale_rows(block, slot, head, STRIDES)
    level = FORMAT.load_tile(codes + head * s_h, block * s_b + slot * s_s, scales, scale_row, seen, D, BLOCK_D)
    scale = FORMAT.row_scale(scales, scale_row, seen)
    tl.store(to_codes + (row * D)[:, None] + dim, level, mask=known[:, None] & (dim < D))
    tl.store(to_scales + row, scale, mask=known)


@triton.jit(do_not_specialize=["num_blocks", "columns"])
def _levels_kernel(
    key, value, table, seq_lens, k_scale_cache, v_scale_cache, to_key, to_value, to_table, to_k_scales, to_v_scales,
    num_blocks, columns, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, s_table, S: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    number, block, slot, known, seen = tokens_of(
        table, seq_lens, to_table, num_blocks, columns, s_table, S, TOKENS, MASK
    )
    row = number * H + head
    _copy_rows(
        key, k_scale_cache, to_key, to_k_scales, block, slot, head, row, seen, known, sk_b, sk_s, sk_h, D, BLOCK_D,
        K_FORMAT, K_STRIDES,
    )  # fmt: skip
    _copy_rows(
        value, v_scale_cache, to_value, to_v_scales, block, slot, head, row, seen, known, sv_b, sv_s, sv_h, DV,
        BLOCK_DV, V_FORMAT, V_STRIDES,
    )  # fmt: skip


_COPIED = ("to_key", "to_value", "to_table", "to_k_scales", "to_v_scales")
# `../prefill_sm90/codes_kernel.py` has what is copied in this order.
_launch = Launcher(_levels_kernel, VARYING, _COPIED)
TOKENS = 64  # of a program


def launch(inputs: AttentionInputs, before: AttentionInputs | None = None) -> AttentionInputs:
    """One launch: the call over a copy of what its sequences have in the cache, in blocks of the same size: levels as
    int8 and factors as scales, which is exact, still rotated. before: as of `kernel.launch`."""
    query, key, value, table = inputs[:4]
    k_scales, v_scales = inputs.k_scale_cache, inputs.v_scale_cache
    if table is None or k_scales is None or v_scales is None:
        raise ValueError("packed keys have no blocks and no scales")
    blocks, size, heads, _ = key.shape
    count, columns = len(table), min(table.shape[1], triton.cdiv(inputs.max_seq_len, size))
    dims = query.shape[2], inputs.out.shape[2]
    if before is None:
        rows = (count * columns, size, heads)
        codes = [query.new_empty(*rows, dim, dtype=torch.int8) for dim in dims]
        scales = [query.new_empty(*rows, 1, dtype=torch.float32) for _ in dims]
        copied = (*codes, table.new_empty(count, columns), *scales)
    else:
        copied = (before.key, before.value, before.block_table, before.k_scale_cache, before.v_scale_cache)
    arguments = (
        *(key, value, table, inputs.seq_lens, k_scales, v_scales, *copied, blocks, columns),
        *(*key.stride()[:3], *value.stride()[:3], table.stride(0)),
    )
    powers = [triton.next_power_of_2(dim) for dim in dims]
    constants = {"S": size, "H": heads, "D": dims[0], "DV": dims[1], "BLOCK_D": powers[0], "BLOCK_DV": powers[1]}
    constants |= {"TOKENS": TOKENS, "MASK": tuple(inputs.mask), "K_FORMAT": inputs.format.key.kernels}
    constants |= {"V_FORMAT": inputs.format.value.kernels}
    constants |= {"K_STRIDES": plane_strides(k_scales), "V_STRIDES": plane_strides(v_scales)}
    with on_device(key):
        grid = (triton.cdiv(columns * size, TOKENS), count, heads)
        _launch(grid, arguments, constants, num_warps=num_warps(TOKENS, max(powers)))
    names = ("key", "value", "block_table", "k_scale_cache", "v_scale_cache")
    return inputs._replace(**dict(zip(names, copied, strict=True)), kv_cache_dtype=INT8.name)
