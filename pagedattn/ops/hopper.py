"""Which calls the prefill kernel for Hopper serves, and why not the others."""

from __future__ import annotations

from functools import cache

import torch

from .attention_inputs import AttentionInputs
from .hopper_list import ITEM_ROWS, Bounds, Listing, in_parts, pack_of
from .launch import DECODE_TOKENS, reach, shares_keys_out
from .library import interpreted
from .triton_versions import why_untried

HEAD_DIMS = (64, 128, 256)
_SHORT = 1024  # keys of a decode that may be one item in any step
_KEYS_PER_SM_ITEM = 2048  # of longer ones, for each that an SM has


def why_not_here(device: torch.device) -> str:
    """Why the kernel cannot run on `device`; "" where it can."""
    return why_not_on(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


@cache
def why_not_on(capability: tuple[int, int] | None) -> str:
    """Why the kernel cannot run on a GPU of this compute capability (None: no GPU); "" where it can."""
    if capability != (9, 0):
        return "no Hopper GPU"
    if reason := why_untried():
        return reason
    return "kernels are interpreted" if interpreted() else ""


def why_not_shape(
    dtype: torch.dtype, stored: torch.dtype, head_dim: int, head_dim_v: int, block_size: int | None, alibi: bool
) -> str:
    """Why the kernel does not serve heads, caches (of unknown blocks where None) or features of this kind, or ""."""
    if dtype not in (torch.bfloat16, torch.float16) or stored != dtype:
        return f"queries of {dtype} over a cache of {stored}"
    if head_dim not in HEAD_DIMS or head_dim_v != head_dim:
        return f"head dims {head_dim} and {head_dim_v}, not {', '.join(map(str, HEAD_DIMS))}"
    if block_size is not None and (block_size < 16 or block_size & (block_size - 1)):
        return f"blocks of {block_size}, not of a power of two from 16 on"
    return "ALiBi" if alibi else ""


def why_not(inputs: AttentionInputs) -> str:
    """Why the kernel does not serve this call; "" where it does."""
    query, key, value, table = inputs[:4]
    if table is None or inputs.deterministic:
        return "no paged cache" if table is None else "deterministic"
    if not table.shape[1] or not len(key) or inputs.scale <= 0:
        return "an empty cache, or a scale that is not positive"
    if inputs.k_scale is not None or inputs.v_scale is not None or inputs.out_scale != 1.0:
        return "scales of a cache that is not fp8"
    facts = (query.dtype, key.dtype, query.shape[2], value.shape[3], key.shape[1], inputs.alibi_slopes is not None)
    reason = why_not_here(query.device) or why_not_shape(*facts)
    if reason:
        return reason
    if not (_aligned(query) and _aligned(key) and _aligned(value) and _is_matrix(key) and _is_matrix(value)):
        return "strides that TMA cannot follow"
    return ""


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether TMA can read it: 16-byte addresses, the last dimension contiguous."""
    steps = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and steps and tensor.stride(-1) == 1


def _is_matrix(cache: torch.Tensor) -> bool:
    """Whether a cache [P, S, H, D] is a matrix of slots: blocks a whole number of slots apart, and heads either so too
    or beside each other within a slot; with rows that int32 can count."""
    blocks, size, heads, dim = cache.shape
    per_block, per_slot, per_head, _ = cache.stride()
    if per_slot < dim or per_block % per_slot or (blocks * per_block) // per_slot + heads * size >= 1 << 31:
        return False
    within = (heads - 1) * per_head + dim <= per_slot
    return heads == 1 or within or (per_head >= per_slot and per_head % per_slot == 0)


def choices(listing: Listing, bounds: Bounds, served: bool) -> dict[str, bool]:
    """How `launches` is to plan a step of several tokens, whose prompts this kernel serves or not; for the op and for
    metadata, which must decide alike."""
    if served:
        return {"joined": takes_all(listing, bounds)}
    rest, keys = bounds.num_seqs - bounds.num_decodes, reach(listing.window, bounds.max_query_len, bounds.max_seq_len)
    facts = (listing.kv_heads, listing.group, bounds.max_query_len, keys, listing.num_sms)
    return {"keys_shared_out": shares_keys_out(rest, *facts)}


def takes_all(listing: Listing, bounds: Bounds) -> bool:
    """Whether this kernel, where it can, serves a whole step, decodes included."""
    return joins(listing, bounds) if bounds.max_query_len > DECODE_TOKENS else takes(listing, bounds)


def joins(listing: Listing, bounds: Bounds) -> bool:
    """Whether the decodes of a step that also has prompts are items among theirs: decodes wait for memory while prompts
    compute. Not where so few are so long that some SMs would be left with one while others are done: a launch of their
    own shares their keys out. Nor for heads that do not fit one item, which would read their keys several times."""
    room = max(_SHORT, _KEYS_PER_SM_ITEM * bounds.num_decodes * listing.kv_heads // listing.num_sms)
    return bounds.num_decodes > 0 and pack_of(listing.group) == listing.group and bounds.max_seq_len <= room


def takes(listing: Listing, bounds: Bounds) -> bool:
    """Whether sequences of a few new tokens each are items of this kernel, not of the one for decodes: where their rows
    fill half of what an item's product computes, and either keys are shared out, or no SM is left with much longer
    ones than others."""
    group, items = listing.group, bounds.num_seqs * listing.kv_heads
    several = bounds.max_query_len > 1 and bounds.max_query_len * group >= ITEM_ROWS // 4 and pack_of(group) == group
    even = items >= listing.num_sms and bounds.max_seq_len <= _KEYS_PER_SM_ITEM * items // listing.num_sms
    # As many tokens as there can be: how many rows a query has must not decide.
    most = bounds._replace(tokens=bounds.num_seqs * bounds.max_query_len)
    return several and (even or in_parts(listing, most))
