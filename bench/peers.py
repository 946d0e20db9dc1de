"""FlashAttention-3 and FlashInfer as an engine without this library would call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from pagedattn.backends.flash_attn.versions import FA3, library
from pagedattn.errors import UnsupportedError
from pagedattn.kernels.packing import offsets

from .problem import DEVICE, Paged, Problem
from .run import Run
from .table import Case

_WORKSPACE_BYTES = 512 << 20
_FA3_STORED = "fp8_e4m3"  # all that its 8-bit kernels read, and so what every other format is compared with
# They round queries and probabilities to 3 bits of mantissa as well, which naive attention over that cache does not:
# 4 % of the output, and accumulators of fewer bits add to it over a long context. Reading wrong rows makes it 100 %.
FP8_TOLERANCE = 0.25
DECODE_SPLITS = 32  # what engines let FA3 use at most in a graph of decodes; the kernel balances up to that many


def fa3(problem: Problem) -> Run:
    """`flash_attn_with_kvcache` over the block table, its tiles scheduled once per step.

    Over an 8-bit cache queries are fp8 as well; that somebody has to make them so in each layer is not counted.
    """
    case, plain = _without_sinks(problem), problem.case.kv_cache_dtype == "auto"
    if case.draw and case.kv_cache_dtype not in ("auto", _FA3_STORED):
        # Random cases are judged by their ratios: only a peer that stores what they do is one.
        raise UnsupportedError(f"it reads 16-bit and {_FA3_STORED} caches, and no {case.kv_cache_dtype}")
    form = "auto" if plain else _FA3_STORED
    paged, calls = problem.paged(kv_cache_dtype=form), library(FA3)
    common, queries, descales = paged.common, problem.queries, {}
    if not plain:
        queries = queries.to(paged.layer(0).key.dtype)
        one = torch.ones(common.num_seqs, case.kv_heads, device=DEVICE)
        descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)
    if case.packed:
        return _fa3_varlen(problem, calls)
    decodes_only = common.num_decodes == common.num_seqs
    shared = {"cu_seqlens_q": common.query_start_loc, "causal": True, "num_splits": DECODE_SPLITS * decodes_only}
    window = {"window_size": (case.window - 1, 0)} if case.window else {}
    cap = {"softcap": case.softcap} if case.softcap else {}
    schedule: list[torch.Tensor] = []

    def plan() -> None:
        longest = common.block_table.shape[1] * case.block_size
        sizes = common.num_seqs, common.max_query_len, longest, case.heads, case.kv_heads, case.dim
        types = {"headdim_v": case.dim_v} if case.dim_v else {}
        types |= {"qkv_dtype": queries.dtype, "page_size": case.block_size, "has_softcap": bool(cap), **window}
        schedule[:] = [calls.get_scheduler_metadata(*sizes, common.seq_lens, **types, **shared)]

    def attend(layer: int) -> torch.Tensor:
        cache = paged.layer(layer)
        return calls.flash_attn_with_kvcache(
            *(queries[layer], cache.key, cache.value),
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            max_seqlen_q=common.max_query_len,
            softmax_scale=case.dim**-0.5,
            scheduler_metadata=schedule[0],
            **shared,
            **window,
            **cap,
            **descales,
        )

    kernel = f"flash_attn_with_kvcache{'' if plain else ', fp8 queries'}"
    return Run(plan, plan, attend, lambda: kernel, case.block_size, form, 0.0 if plain else FP8_TOLERANCE)


def _fa3_varlen(problem: Problem, calls: Any) -> Run:
    """`flash_attn_varlen_func` over packed keys and values, which has nothing to plan."""
    case, lens = problem.case, torch.tensor(problem.case.work.seq_lens, dtype=torch.int32)
    common, starts = problem.packed_common(), offsets(lens).to(DEVICE)
    longest = common.max_query_len, int(lens.max())
    options: dict[str, Any] = {"softmax_scale": case.dim**-0.5, "causal": True, "softcap": case.softcap}
    options |= {"window_size": (case.window - 1, 0)} if case.window else {}

    def attend(layer: int) -> torch.Tensor:
        rows = (problem.queries[layer], *problem.rows(layer), common.query_start_loc, starts)
        out = calls.flash_attn_varlen_func(*rows, *longest, **options)
        return out[0] if isinstance(out, tuple) else out  # some builds return the LSE with it

    return Run(lambda: None, None, attend, lambda: "flash_attn_varlen_func", case.block_size)


def flashinfer_wrappers(problem: Problem) -> Run:
    """One wrapper for the decodes, on tensor cores, and one for the rest; a step that has both runs both."""
    case, paged = _without_sinks(problem), _unquantised(problem)
    common, split = paged.common, paged.common.num_decodes
    shape = (case.heads, case.kv_heads, case.dim, case.block_size)
    kinds = {"q_data_type": case.torch_dtype, "kv_data_type": case.torch_dtype, "sm_scale": case.dim**-0.5}
    kinds |= {"window_left": case.window - 1, "logits_soft_cap": case.softcap}
    parts: list[tuple[slice, Any, Callable[[], object]]] = []  # rows, wrapper, its plan
    if split:
        wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        some = _pages(problem, 0, split)
        lists = (some.starts, some.pages, some.last, *shape)
        parts.append((slice(0, split), wrapper, partial(wrapper.plan, *lists, seq_lens=some.lens, **kinds)))
    if split < common.num_seqs:
        wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
        some = _pages(problem, split, common.num_seqs)
        lists = (some.queries, some.starts, some.pages, some.last, *shape)
        planned = partial(wrapper.plan, *lists, causal=True, seq_lens=some.lens, **kinds)
        parts.append((slice(split, common.num_tokens), wrapper, planned))

    def plan() -> None:
        for _, _, planned in parts:
            planned()

    def attend(layer: int) -> torch.Tensor:
        cache, query = paged.layer(layer), problem.queries[layer]
        out = torch.empty_like(query)
        for rows, wrapper, _ in parts:
            wrapper.run(query[rows], (cache.key, cache.value), out=out[rows])
        return out

    return Run(plan, None, attend, lambda: " and ".join(type(one).__name__ for _, one, _ in parts), case.block_size)


def flashinfer_persistent(problem: Problem) -> Run:
    """`BatchAttention`: one persistent kernel for prompts and decodes."""
    case, paged = _without_sinks(problem), _unquantised(problem)
    if case.window:
        raise UnsupportedError("BatchAttention has no windows")
    wrapper = _persistent()
    some = _pages(problem, 0, paged.common.num_seqs)
    shape = (case.heads, case.kv_heads, case.dim, case.dim, case.block_size)
    kinds = {"q_data_type": case.torch_dtype, "kv_data_type": case.torch_dtype, "sm_scale": case.dim**-0.5}

    def attend(layer: int) -> torch.Tensor:
        cache = paged.layer(layer)
        return wrapper.run(problem.queries[layer], (cache.key, cache.value))[0]

    kinds |= {"logits_soft_cap": case.softcap}
    plan = partial(wrapper.plan, some.queries, some.starts, some.pages, some.lens, *shape, causal=True, **kinds)
    return Run(plan, None, attend, lambda: "BatchAttention", case.block_size)


class _Pages(NamedTuple):
    """Some sequences' cache as FlashInfer reads it, all int32; on the host, but for `pages`."""

    queries: torch.Tensor  # [n + 1] where each sequence's rows start
    starts: torch.Tensor  # [n + 1] where its pages start
    pages: torch.Tensor  # on the device
    last: torch.Tensor  # [n] keys on its last page
    lens: torch.Tensor  # [n] keys


def _pages(problem: Problem, first: int, end: int) -> _Pages:
    common, size = problem.paged().common, problem.case.block_size
    work = problem.case.work
    lens = torch.tensor(work.seq_lens[first:end], dtype=torch.int32)
    counts = (lens + size - 1) // size
    pages = [common.block_table[first + i, :count] for i, count in enumerate(counts.tolist())]
    queries = torch.tensor(work.query_lens[first:end], dtype=torch.int32)
    return _Pages(offsets(queries), offsets(counts), torch.cat(pages), (lens - 1) % size + 1, lens)


def _without_sinks(problem: Problem) -> Case:
    if problem.case.sinks:
        raise UnsupportedError("called directly it is measured without sinks only")
    return problem.case


def _unquantised(problem: Problem) -> Paged:
    if problem.case.packed or problem.case.dim_v:
        raise UnsupportedError("called directly it is measured over a cache with one head dimension only")
    if problem.case.kv_cache_dtype != "auto":
        raise UnsupportedError("called directly it is measured over 16-bit caches only; FLASHINFER reads fp8")
    return problem.paged()


def flashinfer() -> Any:
    try:
        return import_module("flashinfer")
    except ModuleNotFoundError as error:
        hint = "pip install flashinfer-python"
        raise UnsupportedError(f"FlashInfer needs the module {error.name}, which is not installed; {hint}") from error


@cache
def workspace() -> torch.Tensor:
    """Of all wrappers: calls of one stream never overlap."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)


@cache
def _persistent() -> Any:
    """It owns 400 MB of scratch: one for all cases, planned again by each."""
    return flashinfer().BatchAttention("NHD", DEVICE)
