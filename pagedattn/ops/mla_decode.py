"""mla_decode: absorbed latent attention (MLA) over a paged cache of latent rows, by Triton or by torch."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidInputError
from ..formats.mla_rows.format import format_name
from ..kernels.inputs import AttentionInputs
from ..kernels.mla_decode.plan import MLADecodePlan, can_load, plan_mla_decode, why_not
from ..kernels.reference import attention
from ..kernels.shape import bounds_of, shape_of
from ..runtime.op_registry import choose, expect, load, register
from ..spec import Mask
from .reshape_and_cache import split_scale

_CAUSAL = Mask(causal=True)


def mla_decode(
    query: torch.Tensor,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    latent_dim: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    mask: Mask = _CAUSAL,
    softcap: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: MLADecodePlan | None = None,
    path: str = "auto",
) -> torch.Tensor:
    """Attention of B sequences' new tokens over rows [latent | rotated], whose latent part is the value too.

    Queries come absorbed: q_nope @ W_UK beside the rotated part. The output is the weighted sum of latents, which
    W_UV is yet to be applied to. All heads read the same row, each row once. Source: DeepSeek-V2 (2024), section 2.1.

    Args:
        query: [T, Hq, L + R], last dimension contiguous. rows: the cache [P, S, 1, L + R], of the
            query's dtype or of e4m3, or uint8 [P, S, 1, 656], rows of `fp8_ds_mla`.
        block_table: [B, max_blocks] int32. query_start_loc: [B + 1] int32. seq_lens: [B] int32.
        latent_dim: L, how much of a row is latent. max_query_len, max_seq_len: host upper bounds.
        scale: of the expanded head, (nope + R) ** -0.5, times the square of yarn's mscale where the model has one.
        mask: which keys a query sees, causal where it leaves that open. softcap: cap * tanh(logit / cap).
        k_scale: what elements of e4m3 rows are multiplied with: None for 1, a positive float, or float32 [1].
        out: [T, Hq, L]. lse: [T, Hq] float32 to fill, natural log.
        plan: of `plan_mla_decode` for this step; calls that use one must not run at the same time. None, or one that
            does not fit these tensors: made for this call.

    Returns:
        [T, Hq, L]; rows past query_start_loc[B] are unspecified.

    Raises:
        InvalidInputError: shapes, dtypes, strides or a scale that do not fit each other, or a mask_mod.
        UnsupportedError: path="triton" for what its kernel does not serve.
    """
    expect(rows.dim() == 4 and rows.shape[2] == 1, "rows", "[P, S, 1, L + R]", rows)
    width = query.shape[2] if rows.dtype == torch.uint8 else rows.shape[3]
    if not 1 <= latent_dim <= width:
        raise InvalidInputError("latent_dim", f"in 1..{width}, as part of a row", latent_dim)
    if mask.mask_mod is not None:
        raise InvalidInputError("mask", "without a mask_mod", "one", "use paged_attention(path='torch')")
    if out is None:
        out = query.new_empty(*query.shape[:2], latent_dim)
    expect(out.dim() == 3 and out.shape[2] == latent_dim, "out", f"[T, Hq, {latent_dim}]", out)
    mask = mask.replace(causal=True) if mask.causal is None else mask
    k_tensor, k_factor = split_scale(k_scale, query, rows, "k_scale")
    numbers = (float(scale) * k_factor, k_factor, mask.constants, float(softcap or 0.0), max_query_len, max_seq_len)
    tensors = (query, rows, block_table, query_start_loc, seq_lens, k_tensor, out, lse)
    _inputs(*tensors, *numbers).check()
    _op(*tensors, *numbers, None if plan is None else plan.workspace, path, plan=plan)
    return out


def _inputs(
    query: torch.Tensor,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    out_scale: float,
    mask: tuple[int, ...],
    softcap: float,
    max_query_len: int,
    max_seq_len: int,
) -> AttentionInputs:
    """The call as attention of one KV head, whose values are a view of its keys."""
    name = format_name(rows)
    width = rows.shape[3] if rows.dtype == torch.uint8 else out.shape[2]
    tensors = (query, rows, rows[..., :width], block_table, query_start_loc, seq_lens)
    bounds = (max_query_len, max_seq_len, 0, False)
    given = (None, None, k_scale, k_scale, out, lse, scale, out_scale)
    return AttentionInputs(*tensors, *given, tuple(mask), softcap, *bounds, kv_cache_dtype=name)


def _run(*args: Any, plan: MLADecodePlan | None = None) -> None:
    inputs, (workspace, path) = _inputs(*args[:-2]), args[-2:]
    if len(inputs.query) == 0 or len(inputs.seq_lens) == 0:
        return
    shape = shape_of(inputs)
    if choose(path, inputs.query.device, needs=why_not(shape)) != "triton":
        attention.attend(inputs)
        return
    extent = (inputs.key.shape[1] - 1) * inputs.key.stride(1)
    expect(extent < 2**31, "rows", "a cache whose blocks reach over less than 2**31 elements", inputs.key)
    if plan is None or not plan.serves(shape, len(inputs.seq_lens), inputs.key):
        plan = plan_mla_decode(shape, bounds_of(inputs), inputs.query.device, can_load(inputs.key))
        plan.take_workspace(workspace, inputs.query.device)
    load(f"kernels.mla_decode.{plan.module}").launch(plan.config, inputs, plan.workspace)


def _fake(*args: object) -> None:
    return None


_op = register(
    "mla_decode(Tensor query, Tensor rows, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor? k_scale, Tensor(a!) out, Tensor(b!)? lse, float scale, float out_scale, int[] mask, float softcap, "
    "SymInt max_query_len, SymInt max_seq_len, Tensor(c!)? workspace, str path) -> ()",
    _run,
    _fake,
)
