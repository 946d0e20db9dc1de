"""What a decoder does between its matrix products: one Triton kernel each on a GPU, plain torch elsewhere.

All are bound by memory. Bytes for T tokens of e bytes an element, and the floor for 256 tokens of a 0.6B model (hidden
1024, 16 query and 8 KV heads of 128, intermediate 3072) in bfloat16 at 4.3 TB/s, where a launch alone takes 1.5 us:

rms_norm        T x hidden x 2e (4e with a residual): 2.1 MB, 0.5 us
turn_and_write  T x D x e x (2 Hq + 4 Hkv + 1):       4.2 MB, 1.0 us
silu_mul        T x intermediate x 3e:                4.7 MB, 1.1 us

Keys for a cache whose format encodes them are turned in place first, and read again by the same program: to an int8
cache 4.3 MB.
"""

from __future__ import annotations

import torch

from pagedattn import LayerCache, ops

from .rope import rotate

Scale = float | torch.Tensor | None

_FUSED = (torch.bfloat16, torch.float16, torch.float32)


def fuses(x: torch.Tensor) -> bool:
    """Whether the kernels run for `x`: on a GPU, in a dtype that they compute in."""
    return x.is_cuda and x.dtype in _FUSED


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] by weight [N, K] transposed, plus bias [N]; to [T, N]. A single row is no matrix product."""
    if len(x) == 1 and fuses(x) and x.stride(1) == 1 and weight.is_contiguous():
        from .kernels.row_product import row_product

        return row_product(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Computed in float32 in every model dtype, float64 included, and rounded before the weight: as transformers does.

    Args:
        x: [..., size]; rows of any stride. weight: [size].
        residual: [T, size] that x is added to in place; the sum is what is normed.

    Returns:
        The normed values, of x's shape and dtype.
    """
    if x.dim() == 2 and fuses(x):
        from .kernels import fused

        return fused.rms_norm(x, weight, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of merged projections [T, 2 * intermediate_size], gate first; to [T, intermediate_size]."""
    if fuses(gate_up):
        from .kernels import fused

        return fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def turn_and_write(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    scales: tuple[Scale, Scale] = (None, None),
) -> torch.Tensor:
    """Norm (where there are weights) and turn queries and keys, and write keys and values to their slots.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], a projection's own output; its queries and keys may be overwritten.
        weights: of the query and of the key norm, each [D], or None.
        cos_sin: [max_positions, D], cosines first. positions: [T] of the tokens.
        cache: what `Attention` would write to, of any format. slots: [n] int64, n <= T; outside means skip.
        scales: k_scale and v_scale of an fp8 cache, as `Attention.kv_scales` has them.

    Returns:
        The queries [T, Hq, D].
    """
    kv_heads, dim = cache.key.shape[2], cos_sin.shape[1]  # a cache's rows may be packed
    if fuses(qkv):
        from .kernels import fused

        fused.turn_and_write(qkv, weights, eps, cos_sin, positions, cache, slots, scales)
        return _heads(qkv, kv_heads, dim)[0]
    query, key, value = turned(qkv, kv_heads, dim, weights, eps, cos_sin, positions)
    ops.reshape_and_cache(
        key, value, cache.key, cache.value, slots, k_scale=scales[0], v_scale=scales[1], **cache.stored
    )
    return query


def turned(
    qkv: torch.Tensor,
    kv_heads: int,
    dim: int,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, D] of a packed projection, by torch, queries and keys normed and turned."""
    query, key, value = _heads(qkv, kv_heads, dim)
    if weights is not None:
        query, key = rms_norm(query, weights[0], eps), rms_norm(key, weights[1], eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def _heads(qkv: torch.Tensor, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, D] of a packed projection, as views of it."""
    queries = qkv.shape[1] // dim - 2 * kv_heads
    query, key, value = qkv.unflatten(1, (-1, dim)).split((queries, kv_heads, kv_heads), 1)
    return query, key, value
