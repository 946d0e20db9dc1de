"""Which calls the prefill kernel for Hopper serves, and why not the others."""

from __future__ import annotations

from functools import cache

import torch

from ...runtime.op_registry import interpreted
from ...runtime.triton_versions import why_untried
from ..inputs import AttentionInputs

HEAD_DIMS = (64, 128, 256)


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
