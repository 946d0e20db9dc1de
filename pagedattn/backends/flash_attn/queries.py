"""What FlashAttention 3 takes over an fp8 cache: queries of fp8, and a factor of each sequence and KV head."""

from __future__ import annotations

import torch

from ...call import AttentionCall
from ...formats.fp8.format import FP8, SMALLEST_MAXIMUM
from ...kernels.inputs import scale_parts
from ...runtime.op_registry import choose, load
from ...spec import AttentionSpec
from ...step.metadata import CommonAttentionMetadata

_MOST = FP8[torch.float8_e4m3fn]


def fp8_queries(
    call: AttentionCall, spec: AttentionSpec, common: CommonAttentionMetadata
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Queries [T, Hq, D] e4m3, and q_descale, k_descale and v_descale, each [B, Hkv] float32; nothing is waited for.

    The largest magnitude of a sequence's queries of a KV head becomes 448. Scale tensors are expanded, not copied.

    Raises:
        InvalidInputError: a scale tensor that is not float32 of one element or of [Hkv], or is on another device.
    """
    heads, shape = spec.kv_heads, (common.num_seqs, spec.kv_heads)
    keys = scale_parts("k_scale", call.k_scale, heads, call.query.device)
    values = scale_parts("v_scale", call.v_scale, heads, call.query.device)
    codes, descales = quantise_queries(
        call.query, common.query_start_loc, heads, common.max_query_len, keys[1], values[1]
    )
    tensors = (None, keys[0], values[0])
    names = ("q_descale", "k_descale", "v_descale")
    chosen = [one if given is None else given.expand(shape) for one, given in zip(descales, tensors, strict=True)]
    return codes, dict(zip(names, chosen, strict=True))


def quantise_queries(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_heads: int,
    max_query_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    path: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Hq, D], query_start_loc [B + 1] -> codes [T, Hq, D] e4m3 and descales [3, B, Hkv] float32: of queries,
    and `k_scale` and `v_scale` everywhere. Codes of rows past the last sequence are unspecified."""
    num_seqs, device = len(query_start_loc) - 1, query.device
    if choose(path, device) == "triton":
        codes = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=device)
        descales = torch.empty(3, num_seqs, kv_heads, device=device)
        given = (query, query_start_loc, codes, descales, max_query_len, k_scale, v_scale)
        load("kernels.quantise_queries.kernel").launch(*given)
        return codes, descales
    row = torch.arange(len(query), device=device)
    seq = torch.searchsorted(query_start_loc[1:], row, right=True)  # num_seqs of rows past the last
    groups = query.float().unflatten(1, (kv_heads, -1))
    largest = torch.zeros(num_seqs + 1, kv_heads, device=device)
    largest.scatter_reduce_(0, seq[:, None].expand(-1, kv_heads), groups.abs().amax((2, 3)), "amax")
    # by a tensor: CUDA multiplies by the reciprocal of a number, which rounds another way than the kernel
    scale = torch.where(largest < SMALLEST_MAXIMUM, 1.0, largest / torch.full_like(largest, _MOST))
    codes = (groups / scale[seq][:, :, None, None]).flatten(1, 2).to(torch.float8_e4m3fn)
    every = torch.ones_like(scale[:-1])
    return codes, torch.stack((scale[:-1], every * k_scale, every * v_scale))
