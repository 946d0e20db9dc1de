"""Absorbed latent attention (MLA) by FlashMLA, FlashAttention-3 and FlashInfer, as an engine without this library would
call them."""

from __future__ import annotations

from typing import Any

import torch

from pagedattn.backends.flash_attn.versions import FA3, library
from pagedattn.backends.flash_mla import metadata as flash_mla_backend
from pagedattn.errors import UnsupportedError
from pagedattn.kernels.packing import offsets

from . import flash_mla_library
from .peers import DECODE_SPLITS, FP8_TOLERANCE, flashinfer, workspace
from .problem import DEVICE, Problem
from .run import Run


def flash_mla(problem: Problem) -> Run:
    """`flash_mla_with_kvcache` over blocks of 64, whatever the case's are. Its schedule is made by the step's first
    call and is good for these lengths only, so that each step begins without one."""
    if problem.case.kv_cache_dtype != "auto":
        return _flash_mla_fp8(problem)
    case, calls = problem.case, flash_mla_backend.library()
    paged, tokens = problem.paged(flash_mla_backend.BLOCK_SIZE), _tokens_of_each(problem)
    common = paged.common
    schedule: list[Any] = []

    def plan() -> None:
        schedule[:] = calls.get_mla_metadata(common.seq_lens, tokens * case.heads, 1)

    def attend(layer: int) -> torch.Tensor:
        query, rows = problem.queries[layer].unflatten(0, (-1, tokens)), paged.layer(layer).key
        lengths = (common.block_table, common.seq_lens)
        options = {"softmax_scale": case.scale, "causal": True}
        out, _ = calls.flash_mla_with_kvcache(query, rows, *lengths, case.latent, *schedule, **options)
        return out.flatten(0, 1)

    return Run(plan, plan, attend, lambda: "flash_mla_with_kvcache", flash_mla_backend.BLOCK_SIZE)


def _flash_mla_fp8(problem: Problem) -> Run:
    """FlashMLA's decode of e4m3 queries over e4m3 rows, whatever 8-bit format is compared with it. Queries are e4m3
    already, so that its time does not include rounding them."""
    case, form, size = problem.case, "fp8_e4m3", flash_mla_backend.BLOCK_SIZE
    schedule_of, decode = flash_mla_library.fp8_operators()
    paged, tokens = problem.paged(size, form), _tokens_of_each(problem)
    common, one = paged.common, torch.ones(1, device=DEVICE)
    queries = problem.queries.to(torch.float8_e4m3fn)
    schedule: list[torch.Tensor] = []

    def plan() -> None:
        schedule[:] = schedule_of(common.seq_lens, tokens * case.heads, 1)

    def attend(layer: int) -> torch.Tensor:
        query, rows = queries[layer].unflatten(0, (-1, tokens)), paged.layer(layer).key
        lengths = (common.seq_lens, common.block_table)
        out, _ = decode(query, rows, case.latent, *lengths, case.scale, True, *schedule, one, one)
        return out.flatten(0, 1)

    return Run(plan, plan, attend, lambda: "fwd_kvcache_mla_fp8, fp8 queries", size, form, FP8_TOLERANCE)


def fa3_qv(problem: Problem) -> Run:
    """`flash_attn_with_kvcache` with the latent part of queries as `qv`, its tiles scheduled once per step."""
    _require_16_bit(problem)
    case, paged, calls = problem.case, problem.paged(), library(FA3)
    common, tokens = paged.common, _tokens_of_each(problem)
    shared = {"cu_seqlens_q": common.query_start_loc, "causal": True, "num_splits": DECODE_SPLITS}
    schedule: list[torch.Tensor] = []

    def plan() -> None:
        longest = common.block_table.shape[1] * case.block_size
        sizes = common.num_seqs, tokens, longest, case.heads, 1, case.dim - case.latent
        types = {"qkv_dtype": case.torch_dtype, "headdim_v": case.latent, "page_size": case.block_size}
        schedule[:] = [calls.get_scheduler_metadata(*sizes, common.seq_lens, **types, **shared)]

    def attend(layer: int) -> torch.Tensor:
        query, rows = problem.queries[layer], paged.layer(layer).key
        return calls.flash_attn_with_kvcache(
            *(query[..., case.latent :], rows[..., case.latent :], rows[..., : case.latent]),
            qv=query[..., : case.latent],
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            max_seqlen_q=tokens,
            softmax_scale=case.scale,
            scheduler_metadata=schedule[0],
            **shared,
        )

    return Run(plan, plan, attend, lambda: "flash_attn_with_kvcache, qv", case.block_size)


def flashinfer_mla(problem: Problem) -> Run:
    """`BatchMLAPagedAttentionWrapper`, planned on the host from the exact lengths."""
    _require_16_bit(problem)
    case, paged = problem.case, problem.paged()
    common, latent = paged.common, case.latent
    wrapper = flashinfer().BatchMLAPagedAttentionWrapper(workspace())
    lens = torch.tensor(case.work.seq_lens, dtype=torch.int32)
    counts = (lens + case.block_size - 1) // case.block_size
    pages = torch.cat([common.block_table[i, :count] for i, count in enumerate(counts.tolist())])
    queries = offsets(torch.tensor(case.work.query_lens, dtype=torch.int32))
    lists = (queries, offsets(counts), pages, lens)
    shape = (case.heads, latent, case.dim - latent, case.block_size)

    def plan() -> None:
        wrapper.plan(*lists, *shape, True, case.scale, case.torch_dtype, case.torch_dtype)

    def attend(layer: int) -> torch.Tensor:
        query, rows = problem.queries[layer], paged.layer(layer).key.squeeze(2)
        parts = (query[..., :latent], query[..., latent:], rows[..., :latent], rows[..., latent:])
        out = torch.empty(*query.shape[:2], latent, dtype=query.dtype, device=DEVICE)
        return wrapper.run(*parts, out=out)

    kernel = "BatchMLAPagedAttentionWrapper"
    return Run(plan, None, attend, lambda: f"{kernel}, {getattr(wrapper, '_backend', '')}", case.block_size)


def _require_16_bit(problem: Problem) -> None:
    if problem.case.kv_cache_dtype != "auto":
        raise UnsupportedError("it is measured over latent rows in 16 bit")


def _tokens_of_each(problem: Problem) -> int:
    """New tokens of every sequence: these kernels take batches of one number."""
    counts = {*problem.case.work.query_lens}
    if len(counts) > 1:
        raise UnsupportedError(f"it is measured where all sequences have as many new tokens, got {sorted(counts)}")
    return counts.pop()
