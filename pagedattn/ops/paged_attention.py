"""paged_attention: the one attention op, over a paged cache or packed keys, by Triton or by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..errors import InvalidInputError
from ..formats.base import check_takes_scales
from ..formats.registry import stored_as
from ..kernels.inputs import AttentionInputs, scale_parts
from ..kernels.prefill_sm90 import plan as sm90
from ..kernels.reference import attention
from ..runtime.op_registry import choose, expect, load, register
from ..spec import Mask
from .attention_plan import copied_tile, plan_call
from .launch_plan import KeyPass, LaunchPlan
from .merge_states import merge_attn_states

_CAUSAL = Mask(causal=True)


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
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    num_decodes: int = 0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    accumulate: bool = False,
    prior: torch.Tensor | None = None,
    deterministic: bool = False,
    shared_prefix_len: int = 0,
    kv_cache_dtype: str = "auto",
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    plan: LaunchPlan | None = None,
    path: str = "auto",
) -> torch.Tensor:
    """Attention of B sequences' new tokens over their keys. Source: FlashAttention 2 and PagedAttention (SOSP 2023).

    Args:
        query: [T, Hq, D], last dimension contiguous.
        key, value: caches [P, S, Hkv, D] and [P, S, Hkv, Dv], of the query's dtype or fp8, or the codes of another
            format; or, with block_table None, packed rows [N, Hkv, D].
        block_table: [B, max_blocks] int32. query_start_loc: [B + 1] int32. seq_lens: [B] int32.
        max_query_len, max_seq_len: host upper bounds. num_decodes: the number of leading sequences that have one new
            token each (or, in a batch of nothing else, none: the padding of a captured graph).
        mask: which keys a query sees, causal where it leaves that open; a mask_mod is for the torch path only, and not
            traceable. softcap: cap * tanh(logit / cap), None is no cap.
        k_scale, v_scale: what elements of the query's dtype or of fp8 are multiplied with: a float, or float32 [1] or
            [Hkv]; None is 1.
        sinks, alibi_slopes: [Hq]. out: [T, Hq, Dv] of the query's dtype or float32. lse: [T, Hq] float32 to
            fill, natural log.
        accumulate: out and lse hold attention of the same rows over other keys, with their sinks; afterwards they hold
            attention over both. Rows of no key here keep what they hold.
        prior: float32 [T, Hq, Dv], contiguous: the outputs that are added to, where `out` does not hold them.
        deterministic: a token's result has the same bits in any batch and any chunking (triton path only); keys are
            then never split over programs, which costs speed where few sequences are long.
        shared_prefix_len: the number of first keys, whole blocks that each new token sees, which all sequences have in
            the same blocks, and which decodes shall read once (triton path; elsewhere, and under a window or ALiBi, it
            is ignored).
        kv_cache_dtype: the name of the cache's format; "auto": as its dtype says.
        k_scale_cache, v_scale_cache: planes [P, S or 1, Hkv, n] of a format that keeps scales of its own, as its
            `encode` makes them: those of int8 have four significant bits, and kernels for Hopper lose what others have
            beyond. One whose codes of a value are not Dv wide needs `out`.
        plan: of `plan_attention` for this step, which says what is shared too; calls that use one must not run at the
            same time. None, or one that does not fit these tensors: made for this call.

    Returns:
        [T, Hq, Dv]; rows past query_start_loc[B] are unspecified.

    Raises:
        InvalidInputError: shapes, dtypes or strides that do not fit each other, or a format of latent rows.
    """
    if out is None:
        out = query.new_empty(len(query), query.shape[1], value.shape[-1])
    check_takes_scales(stored_as(kv_cache_dtype, key.dtype), k_scale, v_scale)
    k_scale, k_factor = scale_parts("k_scale", k_scale, key.shape[-2], key.device)
    v_scale, v_factor = scale_parts("v_scale", v_scale, key.shape[-2], key.device)
    tensors = (query, key, value, block_table, query_start_loc, seq_lens, sinks, alibi_slopes, k_scale, v_scale)
    mask, cap = mask.replace(causal=True) if mask.causal is None else mask, float(softcap or 0.0)
    bounds = (max_query_len, max_seq_len, num_decodes, deterministic)
    stored = (k_scale_cache, v_scale_cache, kv_cache_dtype, accumulate or prior is not None, prior)
    inputs = AttentionInputs(*tensors, out, lse, scale * k_factor, v_factor, mask.constants, cap, *bounds, *stored)
    if inputs.format.latent_only:
        remedy = "attend to latent rows by mla_decode"
        raise InvalidInputError("kv_cache_dtype", "a format of keys and values", repr(inputs.format.name), remedy)
    inputs.check()
    if mask.mask_mod is None:
        shared, prefix_len = (None, shared_prefix_len) if plan is None else plan.shared_prefix
        rest = (None, None) if plan is None else (plan.workspace, plan.tile_schedule)
        _op(*inputs, *rest, shared, prefix_len, path, plan=plan)
    elif len(query) and len(seq_lens):
        _attended(inputs, lambda mine: attention.attend(mine, mask.mask_mod))
    return out


def _run(*args: Any, plan: LaunchPlan | None = None) -> None:
    inputs, (workspace, tile_schedule, *shared, path) = AttentionInputs(*args[:-5]), args[-5:]
    if len(inputs.query) == 0 or len(inputs.seq_lens) == 0:
        return
    if choose(path, inputs.query.device) != "triton":
        _attended(inputs, attention.attend)
        return
    _check_extent(inputs)
    if plan is None or not plan.serves(inputs):
        # A schedule is for one mask and block size; how much is shared, only the device may know.
        plan = plan_call(inputs, workspace, tile_schedule if plan is None else None, *shared)
    if plan.accumulates:
        execute(plan, inputs)
    else:
        _attended(inputs, partial(execute, plan))


def _attended(inputs: AttentionInputs, attend: Callable[[AttentionInputs], None]) -> None:
    """Attend by what overwrites `out` and `lse`."""
    if not inputs.accumulate or inputs.lse is None:
        attend(inputs)
        return
    there = (inputs.out if inputs.prior is None else inputs.prior).to(inputs.lse.dtype)
    states, lses = (torch.stack((x, torch.zeros_like(x))) for x in (there, inputs.lse))
    attend(inputs._replace(out=states[1], lse=lses[1], accumulate=False, prior=None))
    _, lse = merge_attn_states(states, lses, out=inputs.out)
    inputs.lse.copy_(lse)


def _check_extent(inputs: AttentionInputs) -> None:
    """The kernels count in 32 bits within a block; 64 there would cost them registers."""
    for name, cache in (("key", inputs.key), ("value", inputs.value)) if inputs.block_table is not None else ():
        extent, most = (cache.shape[1] - 1) * cache.stride(1), "less than 2**31 elements"
        expect(extent < 2**31, name, f"a cache whose blocks reach over {most}; use path='torch'", cache)


def execute(plan: LaunchPlan, inputs: AttentionInputs) -> None:
    """Make a plan's launches for a call that it serves."""
    plan.executed += 1
    packed = inputs.block_table is None
    key_starts = torch.nn.functional.pad(inputs.seq_lens.cumsum(0), (1, 0)) if packed else None
    for (kernel, first, last, longest), config in plan.launches:
        whole = last - first == len(inputs.seq_lens)
        part = (inputs if whole else inputs.part(first, last))._replace(max_query_len=longest)
        if plan.prefix is not None and plan.cascade is not None and first == 0:
            prefix, part = plan.cascade.divide(part)
            plan.prefix.workspace = plan.workspace
            execute(plan.prefix, prefix)
        if isinstance(config, sm90.TileSchedulerParams):
            _launch_sm90(plan, config.pack, part, key_starts)
        elif kernel == "prefill":
            load("kernels.prefill.kernel").launch(config, part, key_starts)
        else:
            load(f"kernels.{kernel}.kernel").launch(config, part, plan.workspace)


def _launch_sm90(plan: LaunchPlan, pack: int, inputs: AttentionInputs, key_starts: torch.Tensor | None) -> None:
    if plan.passes:
        _launch_passes(plan, inputs)
        return
    if not plan.copy_turns:
        family = load(f"kernels.prefill_sm90.{sm90.module_of(plan.shape)}")
        packed = {} if key_starts is None else {"key_starts": key_starts[:-1, None].int()}
        family.launch(inputs, plan.tile_schedule, pack, plan.workspace, **packed)
        _add_up_splits(plan, pack, inputs)
        return
    dequantise, attend = load("kernels.dequantise.kernel").launch, load("kernels.prefill_sm90.copy_kernel").launch
    heads, tile = inputs.key.shape[2] // plan.copy_turns, copied_tile(plan.shape)
    # Decodes have a launch of their own, and a copy no room for their keys.
    inputs, copy = inputs._replace(max_seq_len=min(inputs.max_seq_len, plan.bounds.prompt_keys)), None
    for first in range(0, inputs.key.shape[2], heads):
        copy = dequantise(inputs.heads(first, first + heads), tile, copy)
        attend(copy, plan.tile_schedule, pack, plan.workspace)
        _add_up_splits(plan, pack, copy)


def _add_up_splits(plan: LaunchPlan, pack: int, inputs: AttentionInputs) -> None:
    if plan.splits_prompts:
        load("kernels.prefill_sm90.reduce_splits").launch(inputs, plan.tile_schedule, pack, plan.workspace)


def _launch_passes(plan: LaunchPlan, inputs: AttentionInputs) -> None:
    """Passes are added up in float32, so that each is rounded once, however many there are."""
    lse = inputs.lse
    if lse is None:  # rows of other launches stay what they are
        lse = torch.zeros(inputs.query.shape[:2], dtype=torch.float32, device=inputs.query.device)
    first, *others = plan.passes
    states, lses = inputs.out.new_empty(2, *inputs.out.shape, dtype=torch.float32), torch.stack((lse, lse))
    states[0].copy_(inputs.out)
    _execute_pass(plan, first, inputs._replace(out=states[0], lse=lses[0]))
    for one in others:
        lses[1].fill_(-torch.inf)  # a row that is not attended to has no keys
        _execute_pass(plan, one, inputs._replace(out=states[1], lse=lses[1]))
        lses[0].copy_(merge_attn_states(states, lses, out=states[0])[1])
    inputs.out.copy_(states[0])
    lse.copy_(lses[0])


def _execute_pass(plan: LaunchPlan, one: KeyPass, inputs: AttentionInputs) -> None:
    one.plan.workspace = plan.workspace
    execute(one.plan, one.part(inputs))


def _fake(*args: object) -> None:
    return None


_op = register(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, "
    "Tensor(b!)? lse, float scale, float out_scale, int[] mask, float softcap, SymInt max_query_len, "
    "SymInt max_seq_len, int num_decodes, bool deterministic, Tensor? k_scale_cache, Tensor? v_scale_cache, "
    "str kv_cache_dtype, bool accumulate, Tensor? prior, Tensor(c!)? workspace, Tensor(d!)? tile_schedule, "
    "Tensor? shared, SymInt shared_prefix_len, str path) -> ()",
    _run,
    _fake,
)
