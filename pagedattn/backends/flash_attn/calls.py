"""One attention call in each FlashAttention version's own words, with LSE as we mean it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ...call import AttentionCall
from ...errors import InvalidInputError, UnsupportedError
from ...formats.mla_rows.format import split
from ...spec import AttentionSpec
from .metadata import FlashAttnMetadata, window_size
from .queries import fp8_queries

Result = tuple[torch.Tensor, torch.Tensor | None]  # output [T, Hq, Dv], and LSE [T, Hq] where the call asks for it


def fa2(lib: ModuleType, call: AttentionCall, spec: AttentionSpec, metadata: FlashAttnMetadata) -> Result:
    """FlashAttention 2: `flash_attn`. A batch of decodes folds the query heads of a group, if called as one."""
    common, paged, (key, value) = metadata.common, call.kv_cache is not None, call.keys_and_values
    if paged and key.shape[1] % 256:
        remedy = "build the cache with Selection.block_size"
        raise InvalidInputError("kv_cache", "blocks of a multiple of 256 tokens", key.shape[1], remedy)
    if paged and metadata.decode:
        rows = call.query[: common.num_seqs].unsqueeze(1)
        tables = {"cache_seqlens": common.seq_lens, "block_table": common.block_table}
        options = _options(spec, alibi_slopes=call.alibi_slopes, **tables)
        out, lse = lib.flash_attn_with_kvcache(rows, key, value, **options, return_softmax_lse=True)
        return out.squeeze(1), _natural(lse.squeeze(2)) if call.lse is not None else None
    options = _options(spec, alibi_slopes=call.alibi_slopes, block_table=common.block_table if paged else None)
    # At a longest query of 1 it folds heads into rows, which wants a row of every sequence and leaves LSE folded.
    starts, longest = _varlen(call, metadata), max(common.max_query_len, 2)
    asked = call.lse is not None
    got = lib.flash_attn_varlen_func(*starts[:5], longest, *starts[6:], **options, return_attn_probs=asked)
    if not asked:
        return got, None
    lse, empty = _natural(got[1].t()), metadata.rows_without_keys(len(call.query), bool(spec.causal))
    # It leaves the LSE of a sequence without keys as it finds it.
    return got[0], lse if empty is None else lse.masked_fill_(empty[:, None], -torch.inf)


def fa3(lib: ModuleType, call: AttentionCall, spec: AttentionSpec, metadata: FlashAttnMetadata) -> Result:
    """FlashAttention 3: `flash_attn_interface`. Over fp8 caches its queries are fp8 too, and its output is bfloat16."""
    common, asked = metadata.common, call.lse is not None
    if call.kv_cache is None and spec.latent_dim is not None:
        raise InvalidInputError("kv_cache", "a cache of latent rows", "None", "attend to expanded keys and values")
    if call.kv_cache is not None:
        query, descales = fp8_queries(call, spec, common) if metadata.fp8_queries else (call.query, {})
        keys_and_values = call.keys_and_values
        if spec.latent_dim is not None:  # it takes the rotated part for query and key, and the latent one beside them
            (qv, query), (value, key) = split(query, spec.latent_dim), split(call.kv_cache.key, spec.latent_dim)
            keys_and_values, descales = (key, value), {"qv": qv}
        options = _options(
            spec,
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=max(common.max_query_len, 1),
            scheduler_metadata=metadata.schedule,
            num_splits=metadata.splits,
            return_softmax_lse=asked,
            **descales,
        )
        got = lib.flash_attn_with_kvcache(query, *keys_and_values, **options)
    else:
        # Older builds take no such argument, and return LSE always or never.
        function = lib.flash_attn_varlen_func
        wanted = {"return_attn_probs": asked} if _takes(function, "return_attn_probs") else {}
        got = function(*_varlen(call, metadata), **_options(spec), **wanted)
    out, lse = got[:2] if isinstance(got, tuple) else (got, None)
    if not asked:
        return out, None
    if lse is None:
        remedy = "build a newer one from FlashAttention's hopper folder"
        raise UnsupportedError(f"this build of FlashAttention 3 returns no LSE of attention without a cache; {remedy}")
    return out, _natural(lse.t())


def _options(spec: AttentionSpec, **more: Any) -> dict[str, Any]:
    """Arguments that both versions call the same."""
    fixed = {"softmax_scale": spec.softmax_scale, "causal": bool(spec.causal), "softcap": spec.softcap or 0.0}
    return {**fixed, "window_size": window_size(spec), **more}


def _varlen(call: AttentionCall, metadata: FlashAttnMetadata) -> tuple[Any, ...]:
    """The positional arguments of flash_attn_varlen_func."""
    common = metadata.common
    starts = (common.query_start_loc, metadata.packed_key_starts())
    return (call.query, *call.keys_and_values, *starts, common.max_query_len, common.max_seq_len)


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _natural(lse: torch.Tensor) -> torch.Tensor:
    """[T, Hq] with -inf for rows without keys, where FlashAttention 2 and 3 may say +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)
