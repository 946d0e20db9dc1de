"""Triton: a copy of what sequences have in a quantised cache, in 16 bits, the rows of each one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats.base import plane_strides
from ...formats.hadamard.device import block_of, hadamard, signs
from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ..inputs import VARYING, AttentionInputs
from ..masking import end_key, first_encoded, stops_early
from ..planes import scale_rows
from .plan import FLOAT16_KEYS, num_warps, rotated_tokens, width


@triton.jit(do_not_specialize=["num_blocks", "columns", "s_factors"])
def _dequantise_kernel(
    key, value, table, seq_lens, k_scale_cache, v_scale_cache, to_key, to_value, to_starts, to_scales, num_blocks,
    columns, s_factors, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, s_table, S: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column, slot = token // S, token % S
    seq_len = tl.load(seq_lens + seq)
    inside = (column < columns) & (token < seq_len)
    block = tl.load(table + seq * s_table + column, mask=inside, other=-1).to(tl.int64)
    known = (block >= 0) & (block < num_blocks)
    first = seq * columns * S
    tl.store(to_starts + seq, first.to(tl.int32), mask=(head == 0) & (tl.program_id(0) == 0))
    # Some block of the cache. By a `where` of known ones Triton fails to choose layouts for heads of 64.
    block = tl.maximum(tl.minimum(block, num_blocks - 1), 0)
    seen = known  # by some query: others may not be encoded yet
    if stops_early(MASK):
        seen = known & (token >= first_encoded(MASK)) & (token < end_key(seq_len - 1, seq_len, MASK))
    row = ((first + token) * H + head)[:, None]

    dim = tl.arange(0, BLOCK_D)[None, :]
    k_scale_row = scale_rows(block, slot, head, K_STRIDES)
    at = block * sk_b + slot * sk_s
    k = K_FORMAT.load_tile(key + head * sk_h, at, k_scale_cache, k_scale_row, seen, D, BLOCK_D)
    if K_FORMAT.rotate is not None:
        # Sums of levels, whole numbers, of which float16 has all up to 2048.
        k = hadamard(k.to(tl.float32), D, BLOCK_D) * signs(dim)
        factor = K_FORMAT.row_scale(k_scale_cache, k_scale_row, seen) * block_of(D) ** -0.5
        tl.store(to_scales + (seq * H + head) * s_factors + token, factor)
    elif K_FORMAT.row_scale is not None:
        of_key = K_FORMAT.row_scale(k_scale_cache, k_scale_row, seen)
        # Codes are below 128 in magnitude, what is stored below 2**15; rows that are not numbers do not count.
        largest = tl.max(tl.where(of_key < float("inf"), of_key, 0.0), 0) * 128.0
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 32)
        k = k.to(tl.float32) * (of_key * ((268 - exponent) << 23).to(tl.float32, bitcast=True))[:, None]
        up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        tl.store(to_scales + (seq * H + head) * s_factors + tl.program_id(0), up)
    k = tl.where(seen[:, None], k, 0.0)  # zeros, with which no product is NaN
    if D < BLOCK_D:
        k = tl.where(dim < D, k, 0.0)
    tl.store(to_key + row * BLOCK_D + dim, k.to(to_key.dtype.element_ty), mask=inside[:, None])

    dim = tl.arange(0, BLOCK_DV)[None, :]
    v_scale_row = scale_rows(block, slot, head, V_STRIDES)
    at = block * sv_b + slot * sv_s
    v = V_FORMAT.load_tile(value + head * sv_h, at, v_scale_cache, v_scale_row, seen, DV, BLOCK_DV).to(tl.float32)
    if V_FORMAT.row_scale is not None:
        v *= V_FORMAT.row_scale(v_scale_cache, v_scale_row, seen)[:, None]
    if V_FORMAT.rotate is not None:
        v = V_FORMAT.rotate(v, DV, BLOCK_DV)
    v = tl.where(seen[:, None], v, 0.0)
    if to_value.dtype.element_ty == tl.float16:  # a code may stand for what float16 rounds to infinity
        v = tl.where(v > 65504.0, 65504.0, tl.where(v < -65504.0, -65504.0, v))
    tl.store(to_value + row * BLOCK_DV + dim, v.to(to_value.dtype.element_ty), mask=inside[:, None])


# `../prefill_sm90/copy_kernel.py` has what is copied in this order.
_launch = Launcher(_dequantise_kernel, VARYING, ("to_key", "to_value", "to_starts", "to_scales"))


def launch(inputs: AttentionInputs, tile: int, before: AttentionInputs | None = None) -> AttentionInputs:
    """One launch: the call over a copy of what its sequences have in the cache, [B, S, Hkv, width], S slots each, with
    the number of each one's first row of all in the place of the block table, int32 [B, 1]. before: a call over such a
    copy of as many heads, which is done with: its place is taken.

    Values are times their scales, and rounded to the queries' dtype. Keys whose rows have scales are float16, times a
    power of two of each `tile` keys in order, by which `k_scale_cache` [B, Hkv, tiles] float32 multiplies logits; of
    rotated rows they are sums of levels, and k_scale_cache [B, Hkv, keys], a multiple of `tile`, has a factor of each.
    Other keys are the numbers that their codes stand for, exactly. What no query sees is 0, and so are blocks outside
    the cache; slots behind a sequence's end are not written."""
    query, key, value, table = inputs[:4]
    if table is None:
        raise ValueError("packed keys have no blocks")
    blocks, size, heads, _ = key.shape
    count, columns = len(table), min(table.shape[1], triton.cdiv(inputs.max_seq_len, size))
    dims = query.shape[2], inputs.out.shape[2]
    dim = width(*dims)
    of_key = inputs.format.key
    tile = min(tile, of_key.tile_keys or tile)
    rotated, scaled = of_key.kernels.rotate is not None, of_key.kernels.row_scale is not None
    key_dtype = torch.float16 if of_key.codes in FLOAT16_KEYS else query.dtype
    rows, tiles = (count, columns * size, heads), triton.cdiv(columns * size, tile)
    factors, tokens = (tiles * tile, rotated_tokens(dim)) if rotated else (tiles, tile)
    if before is None:
        to_key, to_value = query.new_empty(*rows, dim, dtype=key_dtype), query.new_empty(*rows, dim)
        to_starts = table.new_empty(count, 1)
        to_scales = query.new_empty(count, heads, factors, dtype=torch.float32) if scaled else None
    else:
        to_key, to_value, to_starts, to_scales = before.key, before.value, before.block_table, before.k_scale_cache
    arguments = (
        *(key, value, table, inputs.seq_lens, inputs.k_scale_cache, inputs.v_scale_cache, to_key, to_value, to_starts),
        *(to_scales, blocks, columns, factors, *key.stride()[:3], *value.stride()[:3], table.stride(0)),
    )
    constants = {"S": size, "H": heads, "D": dims[0], "DV": dims[1], "BLOCK_D": dim, "BLOCK_DV": dim}
    constants |= {
        "TOKENS": tokens,
        "MASK": tuple(inputs.mask),
        "K_FORMAT": of_key.kernels,
        "V_FORMAT": inputs.format.value.kernels,
    }
    constants |= {"K_STRIDES": plane_strides(inputs.k_scale_cache), "V_STRIDES": plane_strides(inputs.v_scale_cache)}
    with on_device(key):
        grid = (triton.cdiv(columns * size, tokens), count, heads)
        _launch(grid, arguments, constants, num_warps=num_warps(tokens, dim))
    copied = {"key": to_key, "value": to_value, "block_table": to_starts, "k_scale_cache": to_scales}
    return inputs._replace(**copied, v_scale_cache=None, kv_cache_dtype="auto")
