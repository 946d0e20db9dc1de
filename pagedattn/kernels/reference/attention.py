"""Attention over a paged cache in plain torch: batched over sequences, any device, any head dimension.

Where torch has a kernel of its own that reads block tables (`varlen`), or where lengths are on the host and
nothing special is asked (`cpu`), those compute instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...spec import Mask
from ...spec.mask import MaskMod
from ..inputs import AttentionInputs
from . import cpu, varlen

_SCORES = 1 << 25  # logits held at once; bounds memory, not what is served


def attend(inputs: AttentionInputs, mask_mod: MaskMod | None = None) -> None:
    """Fill `inputs.out` [T, Hq, Dv] and `inputs.lse` [T, Hq]. No value reaches the host."""
    kind = inputs.query.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            attend(inputs, mask_mod)
        return
    if mask_mod is None and varlen.serves(inputs):
        varlen.attend(inputs)
        return
    if mask_mod is None and cpu.serves(inputs) and cpu.attend(inputs):
        return
    query, out, lse = inputs.query, inputs.out, inputs.lse
    heads, tokens = query.shape[1], torch.arange(len(query), device=query.device)
    starts, lens = inputs.query_start_loc.long(), inputs.seq_lens.long()
    seq = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(lens) - 1)
    row = tokens - starts[seq]
    longest, longest_key, mask = inputs.max_query_len, inputs.max_seq_len, Mask.of(inputs.mask)
    for first, last, low, high in _pieces(len(lens), heads, longest, longest_key, inputs.num_decodes):
        piece = slice(first, last)
        rows = torch.arange(low, high, device=query.device)  # [R]
        q_index = (starts[:-1][piece, None] + rows).clamp_(max=len(query) - 1)  # [b, R]
        k, v, seen = _keys(inputs, lens, piece)
        position = (lens - starts[1:] + starts[:-1])[piece, None] + rows  # [b, R]
        index = torch.arange(seen.shape[1], device=seen.device)
        own = position < lens[piece, None]  # rows behind a sequence's last one see nothing, which may not be there yet
        visible = seen[:, None] & own[..., None] & mask.visible(position[..., None], index)  # [b, R, L]
        v = torch.where(visible.any(1)[..., None, None], v, 0)  # 0 * NaN would reach the output
        o, z = _softmax_attention(inputs, query[q_index], k, v, visible, position, first, mask_mod)
        mine = (seq >= first) & (seq < last) & (row >= low) & (row < high)
        at = ((seq - first).clamp(0, last - first - 1), (row - low).clamp(0, high - low - 1))
        out.copy_(torch.where(mine[:, None, None], o[at].to(out.dtype), out))
        if lse is not None:
            lse.copy_(torch.where(mine[:, None], z[at].to(lse.dtype), lse))


def _pieces(
    num_seqs: int, heads: int, max_query_len: int, max_seq_len: int, num_decodes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Sequences first..last and query rows low..high to handle at once: decodes apart, so that they are not padded."""
    for start, stop, longest in ((0, num_decodes, 1), (num_decodes, num_seqs, max_query_len)):
        if stop <= start or longest == 0:
            continue
        per_row = heads * max(max_seq_len, 1)
        rows = max(1, min(longest, _SCORES // per_row))
        seqs = max(1, _SCORES // (per_row * rows))
        for first in range(start, stop, seqs):
            for low in range(0, longest, rows):
                yield first, min(first + seqs, stop), low, min(low + rows, longest)


def _keys(inputs: AttentionInputs, lens: torch.Tensor, piece: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [b, L, Hkv, D], values [b, L, Hkv, Dv], and which of their rows are the sequence's own [b, L]."""
    key, value, device, form = inputs.key, inputs.value, inputs.key.device, inputs.format
    wide = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    if inputs.block_table is not None:
        size = key.shape[1]
        columns = min(-(-inputs.max_seq_len // size), inputs.block_table.shape[1])
        block = inputs.block_table[piece, :columns].long()
        known = (block >= 0) & (block < len(key))
        block = torch.where(known, block, 0)
        index = torch.arange(columns * size, device=device)
        seen = (index < lens[piece, None]) & known.repeat_interleave(size, 1)
        sides = ((form.key, key, inputs.k_scale_cache), (form.value, value, inputs.v_scale_cache))
        dims = inputs.query.shape[2], inputs.out.shape[2]
        taken = ([_take(plane, block) for plane in planes if plane is not None] for _, *planes in sides)
        k, v = (
            rows.decode(planes, dim, wide).flatten(1, 2)
            for (rows, *_), planes, dim in zip(sides, taken, dims, strict=True)
        )
    else:
        index = torch.arange(inputs.max_seq_len, device=device)
        seen = index < lens[piece, None]
        starts = lens.cumsum(0) - lens
        at = torch.where(seen, starts[piece, None] + index, 0).clamp_(max=max(len(key) - 1, 0))
        k, v = _take(key, at).to(wide), _take(value, at).to(wide)
    return k, v, seen


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index], also for fp8, which torch cannot index on every device."""
    return rows.view(torch.uint8)[index].view(rows.dtype) if rows.element_size() == 1 else rows[index]


def _softmax_attention(
    inputs: AttentionInputs,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    position: torch.Tensor,
    first: int,
    mask_mod: MaskMod | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [b, R, Hq, D], key [b, L, Hkv, D] -> output [b, R, Hq, Dv] and LSE [b, R, Hq]."""
    sinks, softcap = inputs.sinks, inputs.softcap
    (b, rows, heads, _), (_, length, kv_heads, _) = query.shape, key.shape
    packed = heads // kv_heads * rows
    q = query.to(key.dtype).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    q = q.reshape(b, kv_heads, packed, query.shape[3])
    logits = (q @ key.permute(0, 2, 3, 1)).view(b, heads, rows, length).mul_(inputs.scale)
    if inputs.k_scale is not None:  # on the logits: stored keys are exact, and stay so
        logits = logits * _per_head(inputs.k_scale, kv_heads, heads)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    index = torch.arange(length, device=key.device)
    if inputs.alibi_slopes is not None:
        distance = (index - position[..., None]).to(key.dtype)
        bias = distance if Mask.of(inputs.mask).causal else -distance.abs()
        logits = logits + inputs.alibi_slopes.to(key.dtype)[:, None, None] * bias[:, None]
    keep = visible[:, None]
    if mask_mod is not None:
        seq = torch.arange(first, first + b, device=key.device).view(b, 1, 1, 1)
        head = torch.arange(heads, device=key.device).view(1, heads, 1, 1)
        keep = keep & mask_mod(seq, head, position[:, None, :, None], index.view(1, 1, 1, length))
    logits = logits.masked_fill(~keep, -torch.inf)
    peak = logits.amax(-1) if length else logits.new_full((b, heads, rows), -torch.inf)
    if sinks is not None:
        peak = peak.maximum(sinks.to(key.dtype)[:, None])
    shift = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = (logits - shift[..., None]).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks.to(key.dtype)[:, None] - shift).exp()
    output = (weights.reshape(b, kv_heads, packed, length) @ value.transpose(1, 2)).view(b, heads, rows, value.shape[3])
    output = output * inputs.out_scale / total.masked_fill(total == 0, 1.0)[..., None]
    if inputs.v_scale is not None:
        output = output * _per_head(inputs.v_scale, kv_heads, heads)
    return output.transpose(1, 2), (shift + total.log()).transpose(1, 2)


def _per_head(scale: torch.Tensor, kv_heads: int, heads: int) -> torch.Tensor:
    """[1] or [Hkv] as [Hq, 1, 1]."""
    return scale.expand(kv_heads).repeat_interleave(heads // kv_heads)[:, None, None]
