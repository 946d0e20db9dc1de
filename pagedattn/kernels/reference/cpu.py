"""Attention on the CPU where nothing special is asked: decodes by the extension, or like prompts by torch's own kernel.

Lengths are known to the host there: a prompt reads its own keys and no more. The extension reads a decode's keys where
they lie, each once; for torch's kernel they are gathered, beside those of sequences of about the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...runtime.op_registry import choose, csrc_op
from ...spec import Mask
from ..inputs import AttentionInputs

_MASK = 1 << 25  # elements of a mask at once; bounds memory, not what is served
_KEYS = 1 << 25  # elements of keys that decodes gather at once


def serves(inputs: AttentionInputs) -> bool:
    """Whether this path computes a call: plain attention on the CPU, over a cache in the queries' dtype."""
    extras = (inputs.lse, inputs.sinks, inputs.alibi_slopes, inputs.k_scale, inputs.v_scale)
    plain = inputs.softcap == 0 and inputs.key.dtype == inputs.query.dtype and all(extra is None for extra in extras)
    paged = inputs.block_table is not None and inputs.key.numel() > 0 and inputs.value.numel() > 0
    return plain and paged and inputs.query.device.type == "cpu"


def attend(inputs: AttentionInputs) -> bool:
    """Fill `inputs.out` [T, Hq, Dv]; only where `serves` says so.

    Returns:
        False, and nothing is to be relied on, where a block that a sequence holds is outside the cache.
    """
    mask = Mask.of(inputs.mask)
    if inputs.max_query_len <= 1 and mask.sees_all_before and _has_kernel(inputs):
        firsts = inputs.query_start_loc
        if len(inputs.query) == len(inputs.seq_lens) and bool((firsts.diff() == 1).all()):
            seqs = torch.arange(len(inputs.seq_lens), dtype=torch.int32, device="cpu")
            return _extension(inputs, inputs.seq_lens, seqs, firsts[:-1])
    if _outside(inputs):
        return False
    starts, lens, rows = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist(), len(inputs.query)
    decodes = []
    for seq, length in enumerate(lens):
        first, last = min(starts[seq], rows), min(starts[seq + 1], rows)
        # Rows that stand before the sequence's first key see none.
        blind = max(last - first - length, 0) if mask.causal or not length else 0
        inputs.out[first : first + blind] = 0
        if last - first == 1 and not blind and mask.sees_all_before:
            decodes.append((length, seq, first))
        elif first + blind < last:
            _prompt(inputs, seq, first + blind, last, length)
    if decodes and _has_kernel(inputs):
        return _extension(inputs, *torch.tensor(decodes, dtype=torch.int32, device="cpu").t().contiguous())
    for group in _alike(sorted(decodes, reverse=True), inputs.key.shape[2] * inputs.key.shape[3]):
        _gathered(inputs, *zip(*group, strict=True))
    return True


def _table(inputs: AttentionInputs) -> torch.Tensor:
    if inputs.block_table is None:
        raise RuntimeError("packed keys are not served here; ask serves() first")
    return inputs.block_table


def _outside(inputs: AttentionInputs) -> bool:
    """Whether a block that a sequence holds is missing or outside the cache."""
    table, key = _table(inputs), inputs.key
    held = torch.arange(table.shape[1], device="cpu") * key.shape[1] < inputs.seq_lens[:, None]  # [B, max_blocks]
    wrong = held & ((table < 0) | (table >= len(key)))
    too_long = inputs.seq_lens > table.shape[1] * key.shape[1]
    return bool(wrong.any()) or bool(too_long.any())


def _alike(decodes: Sequence[tuple[int, int, int]], width: int) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Runs of decodes, the longest first, none half as long as the first of its run, nor too many for memory."""
    begin = 0
    for at in range(1, len(decodes) + 1):
        longest = decodes[begin][0]
        if at == len(decodes) or 2 * decodes[at][0] < longest or (at - begin + 1) * longest * width > _KEYS:
            yield decodes[begin:at]
            begin = at


def _has_kernel(inputs: AttentionInputs) -> bool:
    """Whether the extension attends to decodes of this kind."""
    kind = inputs.query.dtype in (torch.float32, torch.float64) and inputs.out.dtype == inputs.query.dtype
    return kind and _table(inputs).stride(1) == 1 and choose("auto", inputs.query.device, "decode_attention") == "csrc"


def _extension(inputs: AttentionInputs, lens: torch.Tensor, seqs: torch.Tensor, rows: torch.Tensor) -> bool:
    """One query row of each of b sequences [b], over its keys; False as `attend`."""
    tensors = inputs.query, inputs.key, inputs.value, inputs.block_table
    if not csrc_op("decode_attention")(*tensors, rows, seqs, lens, inputs.scale, inputs.out):
        return False
    if inputs.out_scale != 1:
        inputs.out[rows] *= inputs.out_scale
    return True


def _gathered(inputs: AttentionInputs, lens: Sequence[int], seqs: Sequence[int], rows: Sequence[int]) -> None:
    """One query row of each of b sequences, over L keys and what is masked behind them."""
    key, table = inputs.key, _table(inputs)
    size, kv_heads, at = key.shape[1], key.shape[2], torch.tensor(rows, device="cpu")
    columns, lengths = -(-lens[0] // size), torch.tensor(lens, device="cpu")[:, None]
    held = torch.arange(columns, device="cpu") * size < lengths
    blocks = torch.where(held, table[list(seqs), :columns], 0).flatten()
    seen = torch.arange(columns * size, device="cpu") < lengths  # [b, L]
    behind = ~seen[..., None, None]
    # What lies behind a sequence may be anything: 0 * NaN would reach the output.
    k, v = (
        x.index_select(0, blocks).view(len(lens), -1, kv_heads, x.shape[3]).masked_fill_(behind, 0).transpose(1, 2)
        for x in (key, inputs.value)
    )
    query = inputs.query[at].unflatten(1, (kv_heads, -1))  # [b, Hkv, G, D]
    out = scaled_dot_product_attention(query, k, v, attn_mask=seen[:, None, None], scale=inputs.scale)
    inputs.out[at] = (out if inputs.out_scale == 1 else out * inputs.out_scale).flatten(1, 2).to(inputs.out.dtype)


def _prompt(inputs: AttentionInputs, seq: int, first: int, last: int, length: int) -> None:
    """Query rows first..last, the last ones of a sequence of `length` keys."""
    key, table, count, mask = inputs.key, _table(inputs), last - first, Mask.of(inputs.mask)
    size, low = key.shape[1], mask.first_key(length - count)
    if low >= length:
        inputs.out[first:last] = 0
        return
    blocks = table[seq, low // size : -(-length // size)]
    own = slice(low % size, length - low // size * size)
    k, v = (x.index_select(0, blocks).flatten(0, 1)[own].transpose(0, 1)[None] for x in (key, inputs.value))
    # torch has a mask of its own for a whole prompt, which it multiplies with the scale: -inf times 0 is NaN.
    whole = count == length and bool(mask.causal) and mask.sees_all_before and inputs.scale > 0
    at_once = count if whole else max(1, _MASK // length)
    for start in range(first, last, at_once):
        stop = min(start + at_once, last)
        seen = None if whole else _visible(mask, length, low, length - last + start, length - last + stop)
        out = scaled_dot_product_attention(
            inputs.query[start:stop].transpose(0, 1)[None],
            k,
            v,
            attn_mask=seen,
            is_causal=whole,
            scale=inputs.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        inputs.out[start:stop] = out if inputs.out_scale == 1 else out * inputs.out_scale


def _visible(mask: Mask, length: int, low: int, start: int, stop: int) -> torch.Tensor:
    """Which of the keys low..length the rows at positions start..stop see, [rows, keys] bool."""
    rows, keys = (torch.arange(*ends, device="cpu") for ends in ((start, stop), (low, length)))
    return mask.visible(rows[:, None], keys)
