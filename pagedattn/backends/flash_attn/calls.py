"""One attention call in each FlashAttention version's own words, with LSE as we mean it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...errors import InvalidInputError, UnsupportedError
from ...spec import AttentionSpec
from .metadata import FlashAttnMetadata, window_size


class Call(NamedTuple):
    """What one call is given. key, value: caches [P, S, Hkv, D], or packed rows [N, Hkv, D] where not `paged`."""

    spec: AttentionSpec
    metadata: FlashAttnMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    paged: bool
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    return_lse: bool

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments that all versions call the same."""
        spec = self.spec
        fixed = {"softmax_scale": spec.softmax_scale, "causal": bool(spec.causal), "softcap": spec.softcap or 0.0}
        return {**fixed, "window_size": window_size(spec), **more}

    def varlen(self) -> tuple[Any, ...]:
        """The positional arguments of FA2's and FA3's flash_attn_varlen_func."""
        common = self.metadata.common
        starts = (common.query_start_loc, self.metadata.packed_key_starts())
        return (self.query, self.key, self.value, *starts, common.max_query_len, common.max_seq_len)


Result = tuple[torch.Tensor, torch.Tensor | None]  # output [T, Hq, Dv] and LSE [T, Hq]


def fa2(lib: ModuleType, call: Call) -> Result:
    """FlashAttention 2: `flash_attn`. A batch of decodes folds the query heads of a group, if called as one."""
    common = call.metadata.common
    if call.paged and call.key.shape[1] % 256:
        remedy = "build the cache with Selection.block_size"
        raise InvalidInputError("kv_cache", "blocks of a multiple of 256 tokens", call.key.shape[1], remedy)
    if call.paged and call.metadata.decode:
        rows = call.query[: common.num_seqs].unsqueeze(1)
        tables = {"cache_seqlens": common.seq_lens, "block_table": common.block_table}
        options = call.options(alibi_slopes=call.alibi_slopes, **tables)
        out, lse = lib.flash_attn_with_kvcache(rows, call.key, call.value, **options, return_softmax_lse=True)
        return out.squeeze(1), _natural(lse.squeeze(2)) if call.return_lse else None
    table = common.block_table if call.paged else None
    options = call.options(alibi_slopes=call.alibi_slopes, block_table=table)
    # At a longest query of 1 it folds heads into rows, which wants a row of every sequence and leaves LSE folded.
    starts, longest = call.varlen(), max(common.max_query_len, 2)
    got = lib.flash_attn_varlen_func(*starts[:5], longest, *starts[6:], **options, return_attn_probs=call.return_lse)
    if not call.return_lse:
        return got, None
    lse, empty = _natural(got[1].t()), call.metadata.rows_without_keys(len(call.query), bool(call.spec.causal))
    # It leaves the LSE of a sequence without keys as it finds it.
    return got[0], lse if empty is None else lse.masked_fill_(empty[:, None], -torch.inf)


def fa3(lib: ModuleType, call: Call) -> Result:
    """FlashAttention 3: `flash_attn_interface`."""
    common, metadata = call.metadata.common, call.metadata
    if call.paged:
        options = call.options(
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=max(common.max_query_len, 1),
            scheduler_metadata=metadata.schedule,
            num_splits=metadata.splits,
            return_softmax_lse=call.return_lse,
        )
        got = lib.flash_attn_with_kvcache(call.query, call.key, call.value, **options)
    else:
        got = _fa3_packed(lib.flash_attn_varlen_func, call)
    out, lse = got[:2] if isinstance(got, tuple) else (got, None)
    if not call.return_lse:
        return out, None
    if lse is None:
        remedy = "build a newer one from FlashAttention's hopper folder"
        raise UnsupportedError(f"this build of FlashAttention 3 returns no LSE of attention without a cache; {remedy}")
    return out, _natural(lse.t())


def _fa3_packed(function: Callable[..., Any], call: Call) -> Any:
    """Output, with LSE where asked for; older builds take no such argument, and return LSE always or never."""
    asked = {"return_attn_probs": call.return_lse} if _takes(function, "return_attn_probs") else {}
    return function(*call.varlen(), **call.options(), **asked)


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def fa4(lib: ModuleType, call: Call) -> Result:
    """FlashAttention 4: `flash_attn.cute`. Written against its API; no run of it is committed."""
    common = call.metadata.common
    keys = {"seqused_k": common.seq_lens, "page_table": common.block_table}
    options = call.options(
        window_size=tuple(None if side < 0 else side for side in window_size(call.spec)),
        learnable_sink=call.sinks,
        num_splits=1,  # more are refused on sm_90, and 0 may choose more
        return_lse=call.return_lse,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        max_seqlen_k=common.max_seq_len,
        **(keys if call.paged else {"cu_seqlens_k": call.metadata.packed_key_starts()}),
    )
    out, lse = lib.flash_attn_varlen_func(call.query, call.key, call.value, **options)
    return out, _natural(lse.t()) if call.return_lse else None


def _natural(lse: torch.Tensor) -> torch.Tensor:
    """[T, Hq] with -inf for rows without keys, where FlashAttention 2 and 3 may say +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf).contiguous()
