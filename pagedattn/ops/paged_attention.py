"""paged_attention: the one attention op, over a paged cache or packed keys, by Triton or by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.decode import cascade
from ..kernels.decode.plan import DecodeConfig, DecodeTuning, decode_config
from ..kernels.inputs import AttentionInputs, scale_parts
from ..kernels.prefill.plan import AttentionConfig, attention_config
from ..kernels.prefill_sm90 import support, tile_schedule
from ..kernels.reference import attention
from ..runtime.op_registry import choose, expect, load, register
from ..runtime.target import target_of
from ..runtime.workspace import COUNTERS, workspace_for
from .attention_plan import choices, launches
from .attention_replay import AttentionReplay, attention_replay

if TYPE_CHECKING:
    from ..runtime.launcher import Launch


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
    mask_mod: attention.MaskMod | None = None,
    deterministic: bool = False,
    workspace: torch.Tensor | None = None,
    items: torch.Tensor | None = None,
    shared_prefix_len: int = 0,
    split: torch.Tensor | None = None,
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
        sliding_window: keys kept, the token's own included; None is all. softcap: cap * tanh(logit / cap), None is no
            cap.
        k_scale, v_scale: what stored elements are multiplied with: a float, or float32 [1] or [Hkv]; None is 1.
        mask_mod: (b, h, q_idx, kv_idx) -> bool tensor of keys to keep; torch path only, not traceable.
        sinks, alibi_slopes: [Hq]. out: [T, Hq, Dv]. lse: [T, Hq] float32 to fill, natural log.
        deterministic: a token's result has the same bits in any batch and any chunking (triton path only); keys are
            then never split over programs, which costs speed where few sequences are long.
        workspace: int32, of `runtime.workspace.new_workspace`, for partial results of the triton path; calls that share
            one must not run at the same time. None: made for this call and what repeats it.
        items: int32 [n, 8 or 16], of `tile_schedule.list_items`, for the sequences that are no decodes; as with a
            workspace, calls that share one must not run at the same time. None: made for this call.
        shared_prefix_len: so many first keys of all sequences, whole blocks that each of their new tokens sees, lie in
            the same blocks, and decodes shall read them once (triton path; elsewhere, and under a window or ALiBi, it
            is ignored). split: of `shared_prefix.fill_split` for the decodes, which may share less. None: made here.
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
        made = _op(*inputs, workspace, items, shared_prefix_len, split, path)
        if replays is not None:
            replays += attention_replay(made, inputs, scale)
    elif len(query) and len(seq_lens):
        attention.attend(inputs, mask_mod)
    return out


def _run(*args: Any) -> list[Launch | None]:
    """What was launched, as far as it can be launched again."""
    inputs, (*rest, path) = AttentionInputs(*args[:-5]), args[-5:]
    if len(inputs.query) == 0 or len(inputs.seq_lens) == 0:
        return []
    if choose(path, inputs.query.device) == "triton":
        return _triton(inputs, *rest)
    attention.attend(inputs)
    return []


def _triton(
    inputs: AttentionInputs,
    workspace: torch.Tensor | None,
    items: torch.Tensor | None,
    shared_prefix_len: int,
    split: torch.Tensor | None,
) -> list[Launch | None]:
    """Sequences of few new tokens, whose keys are shared out over the GPU, and the rest, apart from each other."""
    paged = inputs.block_table is not None
    for name, cache in (("key", inputs.key), ("value", inputs.value)) if paged else ():
        # The kernels count in 32 bits within a block; 64 there would cost them registers.
        extent = (cache.shape[1] - 1) * cache.stride(1)
        expect(
            extent < 2**31, name, "a cache whose blocks reach over less than 2**31 elements; use path='torch'", cache
        )
    key_starts = None if paged else torch.nn.functional.pad(inputs.seq_lens.cumsum(0), (1, 0))
    facts = {"paged": paged, "deterministic": inputs.deterministic}
    if paged and not shared_prefix_len and inputs.max_query_len > 1:
        # Where metadata have planned no list, and have a workspace for that, none is made here.
        facts |= _choices(inputs, workspace is None or items is not None)
    planned = launches(len(inputs.seq_lens), inputs.num_decodes, inputs.max_query_len, **facts)
    if items is not None and all(work.kernel == "decode" for work in planned):
        workspace = None  # it is for the kernel for Hopper, which does not follow all strides
    made: list[Launch | None] = []
    for work in planned:
        whole = work.last - work.first == len(inputs.seq_lens)
        part = (inputs if whole else inputs.part(work.first, work.last))._replace(max_query_len=work.longest)
        if work.kernel == "decode":
            calls = cascade.divide(part, shared_prefix_len, split) if shared_prefix_len else (part,)
            configs = [decode_config_of(one, short=one is not calls[0]) for one in calls]
            if all(one.tiles * (1 + one.tuning.lead) < 2**31 and one.programs <= COUNTERS for one in configs):
                made += _decode(calls, configs, workspace)
                continue
        elif not support.why_not(part):
            made.append(_prefill(part, items, workspace))
            continue
        made.append(load("kernels.prefill.kernel").launch(prefill_config_of(part), part, key_starts))
    return made


def _choices(inputs: AttentionInputs, in_parts: bool) -> dict[str, bool]:
    """in_parts: whether the kernel for Hopper may share out the keys of sequences of a few tokens."""
    listing, bounds = tile_schedule.listing_of(inputs), tile_schedule.bounds_of(inputs)
    if not in_parts:
        listing = listing._replace(max_keys=0)
    return choices(listing, bounds, served=not support.why_not(inputs))


def _prefill(inputs: AttentionInputs, given: torch.Tensor | None, workspace: torch.Tensor | None) -> Launch | None:
    """The kernel for Hopper over these items, whose parts leave states in the workspace, or over a list and in a room
    of this call's own, which is not made again."""
    items, room = tile_schedule.items_of(inputs, given), None
    if tile_schedule.has_parts(items):
        elements = tile_schedule.listing_of(inputs).workspace
        room = workspace_for(elements, None if given is None else workspace, inputs.query.device)
    launch = load("kernels.prefill_sm90.kernel").launch(inputs, items, room)
    return None if given is None else launch


def _decode(
    calls: Sequence[AttentionInputs], configs: Sequence[DecodeConfig], workspace: torch.Tensor | None
) -> list[Launch | None]:
    """One call, or one over a shared prefix and one that goes on from there; how to make them again."""
    made: list[Launch | None] = []
    prior = None
    for call, config in zip(calls, configs, strict=True):
        room = workspace_for(config.workspace, workspace, call.query.device)
        launch = load("kernels.decode.kernel").launch(config, call, room, prior)
        ends = call is calls[-1]
        made.append(launch if ends or launch is None else cascade.without_layer_outputs(launch))
        prior = call.out, call.lse
    return made


def decode_config_of(inputs: AttentionInputs, tuning: DecodeTuning | None = None, short: bool = False) -> DecodeConfig:
    """How the decode kernel serves a call over a paged cache; `tuning` None is what the library chooses."""
    return decode_config(
        **_heads(inputs),
        num_seqs=len(inputs.seq_lens),
        num_kv_heads=inputs.key.shape[-2],
        stored_itemsize=inputs.key.element_size(),
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        short=short,
        tuning=tuning,
    )


def prefill_config_of(inputs: AttentionInputs) -> AttentionConfig:
    """How the prefill kernel serves a call."""
    return attention_config(**_heads(inputs))


def _heads(inputs: AttentionInputs) -> dict[str, Any]:
    query, key = inputs.query, inputs.key
    return {
        "group": query.shape[1] // key.shape[-2],
        "head_dim": key.shape[-1],
        "head_dim_v": inputs.value.shape[-1],
        "itemsize": query.element_size(),
        "target": target_of(query.device),
    }


def _fake(*args: object) -> None:
    return None


_op = register(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, "
    "Tensor(b!)? lse, float scale, float out_scale, bool causal, int window, float softcap, SymInt max_query_len, "
    "SymInt max_seq_len, int num_decodes, bool deterministic, Tensor(c!)? workspace, Tensor(d!)? items, "
    "SymInt shared_prefix_len, Tensor? split, str path) -> ()",
    _run,
    _fake,
)
