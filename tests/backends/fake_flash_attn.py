"""Stand-ins for FlashAttention 2 and 3: their signatures and conventions, computed by definition on any device."""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from pagedattn import Mask
from pagedattn.testing import attention_oracle
from pagedattn.testing.oracle import fp8_oracle

CALLS: list[dict[str, object]] = []


def _attend(q, k, v, lens_q, lens_k, scale, causal, window, softcap, slopes=None, oracle=attention_oracle):
    """Packed q [T, Hq, D]; k, v are lists of [n, Hkv, D]. Returns out and lse [Hq, T], +inf for rows without keys."""
    exact = torch.float64 if oracle is fp8_oracle else None
    assert q.dtype in (torch.float16, torch.bfloat16, exact) and all(x.dtype == q.dtype for x in (*k, *v))
    left, right = (None if side is None or side < 0 else side for side in window)
    assert not causal or right in (None, 0)
    assert left is None or causal or left == right, "the oracle knows symmetric windows only"
    dim = v[0].shape[2] if len(v) else q.shape[2]
    outs, lses = [q.new_empty(0, q.shape[1], dim)], [torch.empty(0, q.shape[1])]
    for rows, n, keys, values in zip(q[: sum(lens_q)].split(lens_q), lens_k, k, v, strict=True):
        options = {"alibi_slopes": slopes, "softcap": softcap or None, "scale": scale}
        mask = Mask(causal, None if left is None else left + 1)
        out, lse = oracle(rows, keys[:n], values[:n], mask=mask, **options)
        outs.append(out.to(q.dtype))
        lses.append(lse.float())
    lse = torch.cat(lses)
    return torch.cat(outs), lse.masked_fill(lse == -math.inf, math.inf).t()


def _pages(cache, table, lens):
    assert table.dtype == torch.int32 and lens.dtype == torch.int32 and table.stride(-1) == 1
    counts = [-(-n // cache.shape[1]) for n in lens.tolist()]
    rows = [cache[row[:count].long()].flatten(0, 1) for row, count in zip(table, counts, strict=True)]
    return [row.clone() for row in rows]


def _descaled(q, keys, values, lens_q, *descales):
    """Float64 of what fp8 elements and their factors [B, Hkv] mean. fp8_oracle rounds such queries to themselves, where
    the largest element of a sequence and KV head is 448."""
    for one in descales:
        assert one.dtype == torch.float32 and one.shape == (len(lens_q), keys[0].shape[1])
    CALLS[-1]["descales"], CALLS[-1]["query"] = descales, q
    assert q.is_contiguous() and q.shape[2] % 16 == 0
    rows, group = q.double(), q.shape[1] // keys[0].shape[1]
    factors = descales[0].repeat_interleave(torch.tensor(lens_q), 0).repeat_interleave(group, 1)[:, :, None]
    rows = torch.cat((rows[: sum(lens_q)] * factors, rows[sum(lens_q) :]))
    keys, values = (
        [one.double() * factor[:, None] for one, factor in zip(many, of, strict=True)]
        for many, of in ((keys, descales[1]), (values, descales[2]))
    )
    return rows, keys, values


def _packed(rows, starts):
    lens = starts.diff().tolist()
    return lens, list(rows[: sum(lens)].split(lens))


def _fa2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0 and q.dim() == 4 and k is None and cache_seqlens is not None
    CALLS.append({"call": "fa2 decode", "window": window_size})
    lens = cache_seqlens.tolist()
    keys, values = (_pages(x, block_table, cache_seqlens) for x in (k_cache, v_cache))
    args = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = _attend(q.flatten(0, 1), keys, values, [q.shape[1]] * len(q), lens, *args)
    return out.view(q.shape), lse.t().reshape(len(q), q.shape[1], -1).transpose(1, 2)


def _fa2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    CALLS.append({"call": "fa2 varlen", "window": window_size})
    lens_k = cu_seqlens_k.diff().tolist()
    assert max(lens_k, default=0) <= max_seqlen_k and cu_seqlens_k.dtype == torch.int32
    if block_table is None:
        keys, values = _packed(k, cu_seqlens_k)[1], _packed(v, cu_seqlens_k)[1]
    else:
        assert k.shape[1] % 256 == 0
        keys, values = (_pages(x, block_table, cu_seqlens_k.diff()) for x in (k, v))
    args = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = _attend(q, keys, values, cu_seqlens_q.diff().tolist(), lens_k, *args)
    out = torch.cat((out, q.new_zeros(len(q) - len(out), *out.shape[1:])))
    lse = torch.nn.functional.pad(lse, (0, len(q) - lse.shape[1]))
    return (out, lse, None) if return_attn_probs else out


def _fa3_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    CALLS.append({"call": "fa3 paged", "window": window_size, "schedule": scheduler_metadata})
    assert cu_seqlens_q is not None and cache_seqlens is not None and max_seqlen_q is not None
    lens_q = cu_seqlens_q.diff().tolist()
    assert max(lens_q, default=0) <= max_seqlen_q
    if scheduler_metadata is not None:
        assert scheduler_metadata.dtype == torch.int32
        dims = [q.shape[2], v_cache.shape[3]]
        made = [len(cache_seqlens), k_cache.shape[1], num_splits, q.itemsize, *dims]
        assert scheduler_metadata.tolist() == [*made, *cache_seqlens.tolist()]
    assert k_cache.dtype == v_cache.dtype == q.dtype
    keys, values = (_pages(x, page_table, cache_seqlens) for x in (k_cache, v_cache))
    args = (lens_q, cache_seqlens.tolist(), softmax_scale, causal, window_size, softcap)
    if qv is not None:
        assert softmax_scale is not None and q.shape[2] == 64 and qv.shape == (*q.shape[:2], 512) and qv.stride(2) == 1
        q, keys = torch.cat((qv, q), -1), [torch.cat(pair, -1) for pair in zip(values, keys, strict=True)]
    if q.dtype == torch.float8_e4m3fn:
        q, keys, values = _descaled(q, keys, values, lens_q, q_descale, k_descale, v_descale)
        out, lse = _attend(q, keys, values, *args, oracle=fp8_oracle)
        out, q = out.bfloat16(), q.bfloat16()
    else:
        out, lse = _attend(q, keys, values, *args)
    out = torch.cat((out, q.new_zeros(len(q) - len(out), *out.shape[1:])))
    lse = torch.nn.functional.pad(lse, (0, len(q) - lse.shape[1]))
    return (out, lse) if return_softmax_lse else out


def _fa3_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    args = (max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size, softcap)
    got = _fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, return_attn_probs=return_attn_probs)
    return got[:2] if return_attn_probs else got


def fa3_of_2_8_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """What the sources of flash-attn 2.8.3 build: no LSE."""
    args = (max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size, softcap)
    return _fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *args)


def fa3_of_2_8_0(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """What the sources of flash-attn 2.8.0 build: LSE always."""
    args = (max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size, softcap)
    return _fa2_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, return_attn_probs=True)[:2]


def _fa3_schedule(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """What it was made of, so that the attention call can tell a stale or foreign schedule."""
    dims = [headdim, headdim_v or headdim]
    head = torch.tensor([batch_size, page_size, num_splits, qkv_dtype.itemsize, *dims], dtype=torch.int32)
    return torch.cat((head.to(cache_seqlens.device), cache_seqlens))


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    vars(module).update(names)
    return module


MODULES = {
    2: {
        "flash_attn_2_cuda": _module("flash_attn_2_cuda"),
        "flash_attn": _module("flash_attn", flash_attn_with_kvcache=_fa2_kvcache, flash_attn_varlen_func=_fa2_varlen),
    },
    3: {
        "flash_attn_interface": _module(
            "flash_attn_interface",
            flash_attn_with_kvcache=_fa3_kvcache,
            flash_attn_varlen_func=_fa3_varlen,
            get_scheduler_metadata=_fa3_schedule,
        )
    },
}
