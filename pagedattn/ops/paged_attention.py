"""paged_attention: the one attention op, over a paged cache or packed keys, by Triton or by torch."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError
from . import attention_torch
from .launch import AttentionConfig, attention_config, target_of
from .library import choose, expect, kernels, register


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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    mask_mod: attention_torch.MaskMod | None = None,
    path: str = "auto",
) -> torch.Tensor:
    """Attention of B sequences' new tokens over their keys. Source: FlashAttention 2 and PagedAttention (SOSP 2023).

    Args:
        query: [T, Hq, D], last dimension contiguous.
        key, value: caches [P, S, Hkv, D] and [P, S, Hkv, Dv]; or, with block_table None, packed rows [N, Hkv, D].
        block_table: [B, max_blocks] int32. query_start_loc: [B + 1] int32. seq_lens: [B] int32.
        max_query_len, max_seq_len: host upper bounds. num_decodes: so many leading sequences have one new
            token each (or, in a batch of nothing else, none: the padding of a captured graph).
        mask_mod: (b, h, q_idx, kv_idx) -> bool tensor of keys to keep; torch path only, not traceable.
        sinks, alibi_slopes: [Hq]. out: [T, Hq, Dv]. lse: [T, Hq] float32 to fill, natural log.

    Returns:
        [T, Hq, Dv]; rows past query_start_loc[B] are unspecified.

    Raises:
        InvalidInputError: shapes, dtypes or strides that do not fit each other.
    """
    _check(query, key, value, block_table, query_start_loc, seq_lens)
    if out is None:
        out = query.new_empty(len(query), query.shape[1], value.shape[-1])
    expect(out.shape == (*query.shape[:2], value.shape[-1]) and out.stride(2) == 1, "out", "[T, Hq, Dv]", out)
    if lse is not None:
        expect(lse.shape == query.shape[:2] and lse.is_contiguous(), "lse", "[T, Hq], contiguous", lse)
    args = (query, key, value, block_table, query_start_loc, seq_lens, sinks, alibi_slopes, out, lse)
    values = (scale, causal, sliding_window or 0, softcap or 0.0, max_query_len, max_seq_len, num_decodes)
    if mask_mod is None:
        _op(*args, *values, path)
    elif len(query) and len(seq_lens):
        attention_torch.attend(*args, *values, mask_mod)
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    expect(query.dim() == 3 and query.stride(2) == 1, "query", "[T, Hq, D], last stride 1", query)
    rank = 3 if block_table is None else 4
    expect(key.dim() == rank and key.stride(-1) == 1 and key.shape[-1] == query.shape[2], "key", f"rank {rank}", key)
    expect(value.dim() == rank and value.stride(-1) == 1, "value", f"rank {rank}, last stride 1", value)
    expect(value.shape[:-1] == key.shape[:-1], "value", f"{list(key.shape[:-1])} and Dv", value)
    expect(query.dtype == key.dtype == value.dtype, "key and value", f"{query.dtype} as the query", key)
    if query.shape[1] % key.shape[-2]:
        raise InvalidInputError("query", f"a multiple of {key.shape[-2]} heads", query.shape[1])
    expect(seq_lens.dtype == torch.int32 and seq_lens.dim() == 1, "seq_lens", "int32 [B]", seq_lens)
    starts = query_start_loc.dtype == torch.int32 and len(query_start_loc) == len(seq_lens) + 1
    expect(starts, "query_start_loc", f"int32 [{len(seq_lens) + 1}]", query_start_loc)
    if block_table is not None:
        table = block_table.dtype == torch.int32 and block_table.dim() == 2 and len(block_table) == len(seq_lens)
        expect(table and block_table.stride(1) == 1, "block_table", f"int32 [{len(seq_lens)}, max_blocks]", block_table)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    max_query_len: int,
    max_seq_len: int,
    num_decodes: int,
    path: str,
) -> None:
    if len(query) == 0 or len(seq_lens) == 0:
        return
    args = (query, key, value, block_table, query_start_loc, seq_lens, sinks, alibi_slopes, out, lse)
    values = (scale, causal, window, softcap)
    if choose(path, query.device) == "triton":
        _triton(*args, *values, max_query_len, max_seq_len, num_decodes)
    else:
        attention_torch.attend(*args, *values, max_query_len, max_seq_len, num_decodes)


def _triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    max_query_len: int,
    max_seq_len: int,
    num_decodes: int,
) -> None:
    """Decodes and the rest in a launch each: they want other tiles, and only decodes split their keys."""
    key_starts = None if block_table is not None else torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
    for first, last, longest in ((0, num_decodes, 1), (num_decodes, len(seq_lens), max_query_len)):
        if last <= first or longest == 0:
            continue
        whole = last - first == len(seq_lens)
        config = attention_config(
            num_seqs=last - first,
            num_kv_heads=key.shape[-2],
            group=query.shape[1] // key.shape[-2],
            head_dim=key.shape[-1],
            head_dim_v=value.shape[-1],
            itemsize=query.element_size(),
            max_query_len=longest,
            max_seq_len=max_seq_len,
            target=target_of(query.device),
        )
        _launch(
            config,
            slice(first, min(len(query), last) if longest == 1 and first == 0 else len(query)),
            query,
            key,
            value,
            block_table if whole or block_table is None else block_table[first:last],
            query_start_loc if whole else query_start_loc[first : last + 1],
            seq_lens if whole else seq_lens[first:last],
            key_starts if whole or key_starts is None else key_starts[first : last + 1],
            sinks,
            alibi_slopes,
            out,
            lse,
            scale,
            causal,
            window,
            softcap,
        )


def _launch(
    config: AttentionConfig,
    rows: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    key_starts: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> None:
    """One launch, and with split keys a merge of the partial states of `rows`, the others being other sequences'."""
    attention = kernels("attention")
    inputs = (query, key, value, block_table, query_start_loc, seq_lens, key_starts, sinks, alibi_slopes)
    values = (scale, causal, window, softcap)
    if config.splits == 1:
        attention.launch(config, *inputs, out, lse, *values)
        return
    heads, dim = query.shape[1], value.shape[-1]
    partial = torch.empty(config.splits, rows.stop, heads, dim, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(config.splits, rows.stop, heads, dtype=torch.float32, device=query.device)
    attention.launch(config, *inputs, partial, partial_lse, *values)
    merged = None if lse is None else lse[rows]
    kernels("merge_states").launch(partial[:, rows], partial_lse[:, rows], out[rows], merged)


def _fake(*args: object) -> None:
    return None


_op = register(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor? sinks, Tensor? alibi_slopes, Tensor(a!) out, Tensor(b!)? lse, float scale, bool causal, "
    "int window, float softcap, SymInt max_query_len, SymInt max_seq_len, int num_decodes, str path) -> ()",
    _run,
    _fake,
)
