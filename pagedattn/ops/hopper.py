"""Which calls the prefill kernel for Hopper serves, and why not the others; what it wants of a step before that."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from .attention_inputs import AttentionInputs
from .launch import DECODE_TOKENS
from .library import expect, interpreted, kernels

HEAD_DIMS = (64, 128, 256)
_ROWS = 128  # packed query rows of an item
FIELDS = 8  # int32 per entry of a list; the first's counters hand out items, the second says how many there are
_SHORT = 1024  # keys of a decode that may be one item in any step
_KEYS_PER_SM_ITEM = 2048  # of longer ones, for each that an SM has
_TRITON = ("3.6.",)  # Gluon is not a stable interface: others only after they were tried


def why_not_here(device: torch.device) -> str:
    """Why the kernel cannot run on `device`; "" where it can."""
    return why_not_on(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


@cache
def why_not_on(capability: tuple[int, int] | None) -> str:
    """Why the kernel cannot run on a GPU of this compute capability (None: no GPU); "" where it can."""
    if capability != (9, 0):
        return "no Hopper GPU"
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "triton is not installed"
    if not found.startswith(_TRITON):
        return f"Gluon of triton {found} was not tried, only of {', '.join(_TRITON)}"
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


def takes_all(
    num_seqs: int, num_decodes: int, kv_heads: int, group: int, max_query_len: int, max_seq_len: int, num_sms: int
) -> bool:
    """Whether this kernel, where it can, serves a whole step, decodes included."""
    if max_query_len > DECODE_TOKENS:
        return joins(num_decodes, kv_heads, group, max_seq_len, num_sms)
    return takes(num_seqs, kv_heads, group, max_query_len, max_seq_len, num_sms)


def joins(num_decodes: int, kv_heads: int, group: int, max_seq_len: int, num_sms: int) -> bool:
    """Whether the decodes of a step that also has prompts are items among theirs: decodes wait for memory while prompts
    compute. Not where so few are so long that some SMs would be left with one while others are done: a launch of their
    own shares their keys out. Nor for heads that do not fit one item, which would read their keys several times."""
    room = max(_SHORT, _KEYS_PER_SM_ITEM * num_decodes * kv_heads // num_sms)
    return num_decodes > 0 and pack_of(group) == group and max_seq_len <= room


def takes(num_seqs: int, kv_heads: int, group: int, max_query_len: int, max_seq_len: int, num_sms: int) -> bool:
    """Whether sequences of a few new tokens each are items of this kernel, not of the one that shares keys out over the
    GPU: where their rows fill half of what an item's product computes, and no SM is left with much longer ones."""
    items = num_seqs * kv_heads
    several = max_query_len > 1 and max_query_len * group >= _ROWS // 4 and pack_of(group) == group
    return several and items >= num_sms and max_seq_len <= _KEYS_PER_SM_ITEM * items // num_sms


def pack_of(group: int) -> int:
    """Query heads of a group in one item: a power of two that divides it, 64 at most."""
    return min(group & -group, 64)


def tokens_of(group: int) -> int:
    """Query tokens of an item."""
    return _ROWS // pack_of(group)


def new_items(tokens: int, num_seqs: int, group: int, device: torch.device) -> torch.Tensor:
    """Room for the list of a step of `tokens` query tokens, int32 [2 + items at most, 8]: counters, number, items."""
    return torch.empty(2 + tokens // tokens_of(group) + num_seqs, FIELDS, dtype=torch.int32, device=device)


def list_items(items: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, group: int) -> None:
    """Fill `items` for sequences [B] on the device; no length is read by the host."""
    kernels("work_list").launch(query_start_loc, seq_lens, items, tokens_of(group))


def items_of(inputs: AttentionInputs, given: torch.Tensor | None) -> torch.Tensor:
    """The list that a step's metadata bring, or one for this call."""
    query, lens = inputs.query, inputs.seq_lens
    if given is not None:
        fits = given.dtype == torch.int32 and given.is_contiguous() and given.dim() == 2 and given.shape[1] == FIELDS
        expect(fits and given.device == query.device, "items", f"int32 [n, {FIELDS}] of hopper.new_items", given)
        return given
    group = query.shape[1] // inputs.key.shape[2]
    items = new_items(len(query), len(lens), group, query.device)
    list_items(items, inputs.query_start_loc, lens, group)
    return items
