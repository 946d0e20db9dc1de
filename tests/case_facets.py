"""What a case of the conformance kit is there for, so that few cases can stand for all (tests/covers.py)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields

import torch

from pagedattn.testing.case import Case

# What no path is chosen by: lengths are told by their shape, and names by what they name.
_APART = {"query_lens", "seq_lens", "dtype", "note", "heads", "head_dim", "head_dim_v", "block_size", "kv_cache_dtype"}
_DEFAULT = Case()


def facets(case: Case) -> set[Hashable]:
    """Each value of a feature beside the phase, which has kernels of its own, and what was named."""
    latent = case.latent_dim is not None
    phase = (latent, max(case.query_lens, default=0) <= 1, len(set(case.query_lens)) > 1)
    found: set[Hashable] = {case.note, *((phase, one) for one in _shape(case))}
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name not in _APART and value != getattr(_DEFAULT, field.name):
            found.add((latent, field.name, str(value)))
            found.add((phase, field.name))
    return found


def facets_by_dtype(case: Case) -> set[Hashable]:
    """`facets` in float32, and in each other dtype each phase beside each format of a cache, and its features."""
    if case.dtype == torch.float32:
        return facets(case)
    latent = case.latent_dim is not None
    stored = (case.kv_cache_dtype.partition(":")[0], case.kv_scale != "none", case.paged)
    features = [one for one in ("softcap", "alibi", "sinks", "mask") if getattr(case, one)] or ["none"]
    return {(case.dtype, latent, max(case.query_lens) <= 1, stored, one) for one in features}


def _shape(case: Case) -> list[Hashable]:
    heads, kv_heads = case.heads
    group = heads // kv_heads
    return [
        ("dim", case.head_dim & (case.head_dim - 1) == 0, case.head_dim > 128, case.head_dim < 32),
        ("values", case.head_dim_v not in (None, case.head_dim)),
        ("group", group & (group - 1) == 0, min(group, 16).bit_length()),
        ("block", case.block_size & (case.block_size - 1) == 0, (case.block_size > 16) - (case.block_size < 16)),
        ("stored", case.kv_cache_dtype),
    ]
