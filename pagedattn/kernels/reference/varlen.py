"""Attention by `torch.nn.attention.varlen`, the FlashAttention 2 that torch ships, where it reads block tables."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from types import ModuleType

import torch

from ...spec import Mask
from ..inputs import AttentionInputs
from ..packing import offsets, rows_without_keys

_MASKS = ("sliding_window",)


@cache
def library() -> ModuleType | None:
    """torch's module, from 2.13; earlier ones (from 2.10) know no block table."""
    try:
        module = import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    return module if "block_table" in signature(module.varlen_attn).parameters else None


def serves(inputs: AttentionInputs) -> bool:
    """Whether torch's kernel computes this call: plain attention in 16 bits, blocks of a multiple of 256 tokens."""
    query, dim = inputs.query, inputs.query.shape[2]
    extras = (inputs.sinks, inputs.alibi_slopes, inputs.k_scale, inputs.v_scale)
    plain = (
        inputs.softcap == 0 and inputs.scale > 0 and inputs.out_scale == 1 and all(extra is None for extra in extras)
    )
    fits = dim == inputs.value.shape[-1] and dim % 8 == 0 and dim <= 256 and inputs.key.dtype == query.dtype
    blocks = inputs.block_table is None or (inputs.key.shape[1] % 256 == 0 and inputs.block_table.shape[1] > 0)
    plain = plain and not Mask.of(inputs.mask).unserved(_MASKS)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return (
        half and plain and fits and blocks and inputs.key.numel() > 0 and _has_kernel(query) and library() is not None
    )


def _has_kernel(query: torch.Tensor) -> bool:
    return query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend(inputs: AttentionInputs) -> None:
    """Fill `inputs.out` [T, Hq, Dv] and `inputs.lse` [T, Hq]; only where `serves` says so."""
    module = library()
    if module is None:
        raise RuntimeError("torch.nn.attention.varlen reads no block table here; ask serves() first")
    query, mask = inputs.query, Mask.of(inputs.mask)
    causal, left = bool(mask.causal), -1 if mask.sliding_window is None else mask.sliding_window - 1
    window = (left, 0 if causal else left)
    key_starts = offsets(inputs.seq_lens)
    table = inputs.block_table
    # At a longest query of 1 it would fold heads into rows, which wants one row of every sequence.
    got = module.varlen_attn(
        query,
        inputs.key,
        inputs.value,
        inputs.query_start_loc,
        key_starts,
        max(inputs.max_query_len, 2),
        inputs.max_seq_len,
        return_aux=None if inputs.lse is None else module.AuxRequest(lse=True),
        scale=inputs.scale,
        window_size=window,
        enable_gqa=query.shape[1] != inputs.key.shape[-2],
        **({} if table is None else {"seqused_k": inputs.seq_lens, "block_table": table}),
    )
    out, lse = got if isinstance(got, tuple) else (got, None)
    inputs.out.copy_(out)
    if inputs.lse is not None and lse is not None:
        empty = rows_without_keys(inputs.query_start_loc, inputs.seq_lens, len(query), causal)
        inputs.lse.copy_(lse.t().masked_fill(empty[:, None], -torch.inf))
