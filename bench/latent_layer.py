"""Latent attention (MLA) by its layer, projections included: its absorbed and its expanded form over the same rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedattn import MLAAttention, StepMetadata, plan_step
from pagedattn.layers.mla_step import MLAMetadata

from .problem import DEVICE, Problem
from .run import Run
from .table import EXPANDED_DIM, Case

FORMS = {"absorbed": 1 << 30, "expanded": 0}  # new tokens of a sequence up to which it is absorbed


def through_latent_layer(problem: Problem, form: str, backend: str) -> Run:
    """`MLAAttention` by these backends, which takes this form whatever the number of new tokens is, without the cache
    write."""
    case, heads, size = problem.case, problem.latent_heads, problem.case.block_size
    if heads is None:
        raise ValueError(f"the case must be one of the layer, with up-projections, got {case.suite} {case.text}")
    layer = MLAAttention(
        *(case.heads, case.latent, case.dim - case.latent, EXPANDED_DIM, EXPANDED_DIM, case.scale),
        kv_cache_dtype=case.kv_cache_dtype,
        max_absorbed_len=FORMS[form],
        block_size=size,
        clean_cache=True,
        backend=backend,
        dtype=case.torch_dtype,
        device=DEVICE,
    )
    paged = problem.paged(size)
    metadata: list[StepMetadata] = [plan_step([layer], paged.common)]

    def plan() -> None:
        metadata[0] = plan_step([layer], paged.common)

    def step() -> None:
        for built in metadata[0].by_key.values():
            layer.builder.device_update(built)

    def attend(index: int) -> torch.Tensor:
        parts = problem.queries[index].split((EXPANDED_DIM, case.dim - case.latent), -1)
        return layer(*parts, None, None, heads.w_uk, heads.w_uv, paged.layer(index), metadata[0])

    (built,) = metadata[0].by_key.values()
    if not isinstance(built, MLAMetadata) or bool(built.num_rows) != (form == "expanded"):
        raise RuntimeError(f"the layer must be {form}, it does: {metadata[0].describe()}")
    return Run(plan, step, attend, lambda: metadata[0].describe(), size, case.kv_cache_dtype, flops=flops(case, form))


def flops(case: Case, form: str) -> float:
    """Multiply-adds of a form, counted twice each: attention to keys and values, and the up-projections, which are of
    query rows where it is absorbed, and else of keys."""
    elements = case.dim + case.latent if form == "absorbed" else case.query_dim + EXPANDED_DIM  # of a key and a value
    attended = case.work.flops(case.heads, elements) / 2
    projected = sum(case.work.query_lens if form == "absorbed" else case.work.seq_lens)
    return attended + 4.0 * projected * case.heads * case.latent * EXPANDED_DIM


def peak_bytes(attend: Callable[[], torch.Tensor]) -> int | None:
    """The most device memory that one call holds beyond what was there before it, its output included."""
    if DEVICE.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
