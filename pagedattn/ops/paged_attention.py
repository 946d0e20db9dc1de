"""paged_attention: the one attention op, over a paged cache or packed keys, by Triton or by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import attention_torch
from .attention_inputs import AttentionInputs, scale_parts
from .attention_replay import AttentionReplay, attention_replay
from .launch import AttentionConfig, attention_config, target_of
from .library import choose, kernels, register

if TYPE_CHECKING:
    from .kernels._launcher import Launch


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_decodes: int = 0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    mask_mod: attention_torch.MaskMod | None = None,
    deterministic: bool = False,
    path: str = "auto",
    replays: list[AttentionReplay] | None = None,
) -> torch.Tensor:
    """Attention of B sequences' new tokens over their keys. Source: FlashAttention 2 and PagedAttention (SOSP 2023).

    Args:
        query: [T, Hq, D], last dimension contiguous.
        key, value: caches [P, S, Hkv, D] and [P, S, Hkv, Dv], of the query's dtype or fp8; or, with block_table None,
            packed rows [N, Hkv, D].
        block_table: [B, max_blocks] int32. query_start_loc: [B + 1] int32. seq_lens: [B] int32.
        max_query_len, max_seq_len: host upper bounds. num_decodes: so many leading sequences have one new
            token each (or, in a batch of nothing else, none: the padding of a captured graph).
        k_scale, v_scale: what stored elements are multiplied with: a float, or float32 [1] or [Hkv]; None is 1.
        mask_mod: (b, h, q_idx, kv_idx) -> bool tensor of keys to keep; torch path only, not traceable.
        sinks, alibi_slopes: [Hq]. out: [T, Hq, Dv]. lse: [T, Hq] float32 to fill, natural log.
        deterministic: a token's result has the same bits in any batch and any chunking (triton path only); keys are
            then never split over programs, which costs speed where few sequences are long.
        replays: is given how to make this call again for tensors of the same layout, where that can be.

    Returns:
        [T, Hq, Dv]; rows past query_start_loc[B] are unspecified.

    Raises:
        InvalidInputError: shapes, dtypes or strides that do not fit each other.
    """
    if out is None:
        out = query.new_empty(len(query), query.shape[1], value.shape[-1])
    k_scale, k_factor = scale_parts("k_scale", k_scale, key.shape[-2], key.device)
    v_scale, v_factor = scale_parts("v_scale", v_scale, key.shape[-2], key.device)
    tensors = (query, key, value, block_table, query_start_loc, seq_lens, sinks, alibi_slopes, k_scale, v_scale)
    window, cap = sliding_window or 0, float(softcap or 0.0)
    bounds = (max_query_len, max_seq_len, num_decodes, deterministic)
    inputs = AttentionInputs(*tensors, out, lse, scale * k_factor, v_factor, causal, window, cap, *bounds)
    inputs.check()
    if mask_mod is None:
        launches = _op(*inputs, path)
        if replays is not None:
            replays += attention_replay(launches, inputs, scale)
    elif len(query) and len(seq_lens):
        attention_torch.attend(inputs, mask_mod)
    return out


def _run(*args: Any) -> list[Launch | None]:
    """What was launched, as far as it can be launched again."""
    inputs, path = AttentionInputs(*args[:-1]), args[-1]
    if len(inputs.query) == 0 or len(inputs.seq_lens) == 0:
        return []
    if choose(path, inputs.query.device) == "triton":
        return _triton(inputs)
    attention_torch.attend(inputs)
    return []


def _triton(inputs: AttentionInputs) -> list[Launch | None]:
    """Decodes and the rest in a launch each: they want other tiles, and only decodes split their keys."""
    seqs, decodes, lens = len(inputs.seq_lens), inputs.num_decodes, inputs.seq_lens
    key_starts = None if inputs.block_table is not None else torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    if inputs.deterministic:
        return [_launch(inputs, key_starts, slice(0, len(inputs.query)), inputs.max_query_len)]
    launches = []
    for first, last, longest in ((0, decodes, 1), (decodes, seqs, inputs.max_query_len)):
        if last <= first or longest == 0:
            continue
        whole = last - first == seqs
        part = inputs if whole else inputs.part(first, last)
        starts = key_starts if whole or key_starts is None else key_starts[first : last + 1]
        rows = len(inputs.query)
        rows = slice(first, min(rows, last) if longest == 1 and first == 0 else rows)
        launches.append(_launch(part, starts, rows, longest))
    return launches


def _config(inputs: AttentionInputs, longest: int) -> AttentionConfig:
    key, value = inputs.key, inputs.value
    return attention_config(
        num_seqs=len(inputs.seq_lens),
        num_kv_heads=key.shape[-2],
        group=inputs.query.shape[1] // key.shape[-2],
        head_dim=key.shape[-1],
        head_dim_v=value.shape[-1],
        itemsize=inputs.query.element_size(),
        max_query_len=longest,
        max_seq_len=inputs.max_seq_len,
        target=target_of(inputs.query.device),
        deterministic=inputs.deterministic,
    )


def _launch(inputs: AttentionInputs, key_starts: torch.Tensor | None, rows: slice, longest: int) -> Launch | None:
    """One launch, and with split keys a merge of the partial states of `rows`, the others being other sequences'."""
    config, attention = _config(inputs, longest), kernels("attention")
    if config.splits == 1:
        return attention.launch(config, inputs, key_starts)
    shape, device = (config.splits, rows.stop, inputs.query.shape[1]), inputs.query.device
    partial = torch.empty(*shape, inputs.value.shape[-1], dtype=torch.float32, device=device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=device)
    attention.launch(config, inputs._replace(out=partial, lse=partial_lse), key_starts)
    merged = None if inputs.lse is None else inputs.lse[rows]
    kernels("merge_states").launch(partial[:, rows], partial_lse[:, rows], inputs.out[rows], merged)
    return None  # the partial states are this call's own


def _fake(*args: object) -> None:
    return None


_op = register(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, "
    "Tensor(b!)? lse, float scale, float out_scale, bool causal, int window, float softcap, SymInt max_query_len, "
    "SymInt max_seq_len, int num_decodes, bool deterministic, str path) -> ()",
    _run,
    _fake,
)
