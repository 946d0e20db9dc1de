"""A stand-in for FlashInfer: its wrappers, with the signatures of 0.6.13, computed by definition on CPU tensors.

It keeps the library's conventions (LSE base 2; what is masked counts as -`inf` before it is scaled, which `behave_as`
makes 5e4 before 0.7 and infinite since) and refuses what would fault or be silently wrong on a GPU. `needs_bytes` is
the workspace its plans ask for; `plans` counts them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pagedattn import Mask
from pagedattn.testing import attention_oracle

needs_bytes = 0
plans = 0
inf = 5e4


def behave_as(release: str) -> None:
    """Be this release in what differs between those that are served."""
    global inf
    inf = 5e4 if release.startswith("0.6.") else math.inf


def _slices(starts: torch.Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


class _Wrapper:
    """What all wrappers share: workspace, plan values, and one attention call."""

    def _init(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and workspace.dim() == 1 and not workspace[:4096].any()
        assert layout in ("NHD", "HND") and workspace.data_ptr() % 16 == 0
        self.workspace, self.layout, self._backend, self.planned = workspace, layout, backend, {}

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert int_workspace_buffer.dtype == torch.uint8 and int_workspace_buffer.numel() >= 8 << 20
        assert float_workspace_buffer.data_ptr() % 16 == 0
        self.workspace = float_workspace_buffer

    def _plan(self, host: tuple[torch.Tensor, ...], **values: Any) -> None:
        global plans
        for one in host:
            assert one.device.type == "cpu" and one.dtype == torch.int32 and one.is_contiguous()
            assert not one.is_pinned(), "a pinned tensor of the caller's may change before it is copied"
        assert isinstance(values["q_dtype"], torch.dtype) and isinstance(values["kv_dtype"], torch.dtype)
        assert values["head_dim"] in (64, 128, 256) and len(host[0]) > 1
        if needs_bytes > self.workspace.numel():
            raise RuntimeError(
                f"Error in function 'aligned_alloc' at allocator.h:49: Buffer overflow when allocating memory for "
                f"batch_prefill_tmp_v with size {needs_bytes} and alignment 16, but only {self.workspace.numel()} "
                "bytes available in AlignedAllocator. Increase the workspace buffer size."
            )
        plans += 1
        self._backend = "fa2" if self._backend == "auto" else self._backend
        self.planned = values

    def _sequence(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """One sequence [q, Hq, D], [k, Hkv, D] twice -> [q, Hq, D] and base-2 LSE [q, Hq], float64."""
        p = self.planned
        if len(k) == 0:
            return torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -inf, dtype=torch.float64)
        k, v = (x.double().repeat_interleave(p["heads"] // p["kv_heads"], 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.double(), k)
        factor = scale * math.log2(math.e)
        if p["cap"]:
            logits, factor = torch.tanh(logits * scale / p["cap"]), p["cap"] * math.log2(math.e)
        i = torch.arange(len(q))[:, None] + len(k) - len(q)
        j = torch.arange(len(k))
        keep = (j <= i) if p["causal"] else (j > -1).expand(len(q), -1)
        if p["window_left"] >= 0:
            keep = keep & (j >= i - p["window_left"])
        logits = torch.where(keep, logits, -inf) * factor
        top = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp2(logits - top)
        total = weights.sum(-1, keepdim=True)
        probabilities = torch.where(total > 0, weights / total, 0)
        return torch.einsum("hqk,khd->qhd", probabilities, v), (top + total.log2()).squeeze(-1).T

    def _run(
        self, q: torch.Tensor, pairs: list[tuple[slice, torch.Tensor, torch.Tensor]], options: dict[str, Any]
    ) -> Any:
        p, out, lse = self.planned, options["out"], options["lse"]
        assert q.dtype == p["q_dtype"] and q.shape[1:] == (p["heads"], p["head_dim"])
        assert options["window_left"] in (None, p["window_left"])
        assert q.stride(2) == 1 and not any(n % 16 for n in (q.data_ptr(), 2 * q.stride(0), 2 * q.stride(1)))
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
        scale = p["scale"] * (options["q_scale"] or 1.0) * (options["k_scale"] or 1.0)
        for rows, k, v in pairs:
            assert k.dtype == v.dtype == p["kv_dtype"] and k.shape[1:] == (p["kv_heads"], p["head_dim"])
            result, sums = self._sequence(q[rows], k, v, scale)
            out[rows], lse[rows] = (result * (options["v_scale"] or 1.0)).to(out.dtype), sums.float()
        return (out, lse) if options["return_lse"] else out


class _Paged(_Wrapper):
    """Page lists, in the wrapper's own buffers where a CUDA graph has them."""

    def _lists(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, lens: torch.Tensor, size: int
    ) -> None:
        assert indices.dtype == torch.int32 and len(indices) == int(indptr[-1]) and int(indptr[0]) == 0
        assert bool(((last >= 1) & (last <= size)).all()) and len(last) == len(lens) == len(indptr) - 1
        pages = indptr.diff()
        assert torch.equal(lens, torch.where(pages > 0, (pages - 1) * size + last, 0)), "two kernels, two lengths"
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last, size

    def _pairs(
        self, q: torch.Tensor, starts: torch.Tensor, cache: Any
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        assert isinstance(cache, tuple)
        keys, values = cache if self.layout == "NHD" else (x.transpose(1, 2) for x in cache)
        assert keys.stride() == values.stride() and keys.shape == values.shape
        assert keys.shape[1] == self.page_size and q.shape[0] == int(starts[-1])
        out = []
        for b, rows in enumerate(_slices(starts)):
            pages = self.indices[int(self.indptr[b]) : int(self.indptr[b + 1])].long()
            assert bool(((pages >= 0) & (pages < len(keys))).all()), f"pages {pages.tolist()} of {len(keys)}"
            length = (len(pages) - 1) * self.page_size + int(self.last[b]) if len(pages) else 0
            out.append((rows, *(x[pages].flatten(0, 1)[:length] for x in (keys, values))))
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    # fmt: off
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
                 paged_kv_last_page_len_buffer: Any = None, backend="auto", jit_args=None) -> None:
        self._init(float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores, self.graph = use_tensor_cores, use_cuda_graph
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
             block_tables=None, seq_lens: Any = None, fixed_split_size=None, disable_split_kv=False,
             q_len_per_req=1) -> None:
        # fmt: on
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        self._plan((indptr, last_page_len, seq_lens), causal=False, heads=num_qo_heads, kv_heads=num_kv_heads,
                   head_dim=head_dim, window_left=window_left, cap=logits_soft_cap, scale=sm_scale,
                   q_dtype=q_data_type, kv_dtype=kv_data_type)  # fmt: skip
        self._lists(indptr, indices, last_page_len, seq_lens, page_size)
        if self.graph:
            mine = self.buffers
            assert len(last_page_len) == len(mine[2]), "the batch size of a graph is fixed"
            assert len(indices) <= len(mine[1]), "more pages than the graph's buffer"
            for buffer, new in zip(mine, (indptr, indices, last_page_len), strict=True):
                buffer[: len(new)] = new
            self.indptr, self.indices, self.last = mine

    # fmt: off
    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
            skip_softmax_threshold_scale_factor=None, kv_cache_sf=None) -> Any:
        # fmt: on
        assert sinks is None, "ignored by these kernels"
        starts = torch.arange(len(self.last) + 1)
        return self._run(q, self._pairs(q, starts, paged_kv_cache), locals())


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    # fmt: off
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None) -> None:
        assert not use_cuda_graph
        self._init(float_workspace_buffer, kv_layout, backend)

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
             logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
             o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
             token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens: Any = None, seq_lens_q=None, block_tables=None,
             max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False) -> None:
        # fmt: on
        assert max_sequence_kv is None, "0.6.13 then forgets the lengths it plans with"
        self._plan((qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens), causal=causal, heads=num_qo_heads,
                   kv_heads=num_kv_heads, head_dim=head_dim_qk, window_left=window_left, cap=logits_soft_cap,
                   scale=sm_scale, q_dtype=q_data_type, kv_dtype=kv_data_type)  # fmt: skip
        self._lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens, page_size)
        self.starts = qo_indptr

    # fmt: off
    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
            skip_softmax_threshold_scale_factor=None) -> Any:
        # fmt: on
        assert sinks is None, "ignored by these kernels"
        return self._run(q, self._pairs(q, self.starts, paged_kv_cache), locals())


class BatchAttention(_Paged):
    def __init__(self, kv_layout="NHD", device="cuda") -> None:
        self._init(torch.zeros(4096, dtype=torch.uint8, device=device), kv_layout, "holistic")

    # fmt: off
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
             page_size, causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16,
             kv_data_type=torch.bfloat16, use_profiler=False) -> None:
        # fmt: on
        self._plan((qo_indptr, kv_indptr, kv_len_arr), causal=causal, heads=num_qo_heads, kv_heads=num_kv_heads,
                   head_dim=head_dim_qk, window_left=-1, cap=logits_soft_cap, scale=sm_scale, q_dtype=q_data_type,
                   kv_dtype=kv_data_type)  # fmt: skip
        self._lists(kv_indptr, kv_indices, (kv_len_arr - 1) % page_size + 1, kv_len_arr, page_size)
        self.starts = qo_indptr

    # fmt: off
    def run(self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0,
            profiler_buffer=None, kv_cache_sf=None) -> Any:
        # fmt: on
        options = {**locals(), "return_lse": True, "window_left": None, "q_scale": None}
        return self._run(q, self._pairs(q, self.starts, kv_cache), options)


class BatchMLAPagedAttentionWrapper:
    # fmt: off
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto") -> None:
        # fmt: on
        assert float_workspace_buffer.dtype == torch.uint8 and backend in ("auto", "fa2", "fa3") and not use_cuda_graph
        self.workspace, self._backend = float_workspace_buffer, "fa2" if backend == "auto" else backend

    # fmt: off
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type, use_profiler=False) -> None:
        # fmt: on
        global plans
        for one in (qo_indptr, kv_indptr, kv_len_arr):
            assert one.device.type == "cpu" and one.dtype == torch.int32 and one.is_contiguous()
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type == kv_data_type
        assert kv_indices.dtype == torch.int32 and len(kv_indices) >= int(kv_indptr[-1])
        assert torch.equal(kv_indptr.diff(), (kv_len_arr + page_size - 1) // page_size)
        surplus = (kv_len_arr > 0) & (qo_indptr.diff() > kv_len_arr)
        assert not causal or not bool(surplus.any()), "positions of rows before the first key are unsigned"
        plans += 1
        self.lists = tuple(one.clone() for one in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        self.values = (num_heads, page_size, causal, sm_scale, q_data_type)

    # fmt: off
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
            kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None) -> Any:
        # fmt: on
        (starts, indptr, indices, lens), (heads, size, causal, scale, dtype) = self.lists, self.values
        assert q_nope.dtype == ckv_cache.dtype == dtype and q_nope.shape == (int(starts[-1]), heads, 512)
        assert ckv_cache.shape[1:] == (size, 512) and kpe_cache.shape[1:] == (size, 64)
        out = torch.empty_like(q_nope) if out is None else out
        assert out.shape == q_nope.shape and out.dtype == dtype
        lse = torch.empty(q_nope.shape[:2]) if lse is None else lse
        query, cache = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1)
        for b, rows in enumerate(_slices(starts)):
            pages = indices[int(indptr[b]) : int(indptr[b + 1])].long()
            keys = cache[pages].flatten(0, 1)[: int(lens[b])][:, None]
            result, sums = attention_oracle(query[rows], keys, keys[..., :512], scale=scale, mask=Mask(causal=causal))
            out[rows] = result.to(dtype)
            lse[rows] = sums.float() * (1.0 if return_lse_base_on_e else math.log2(math.e))
        return (out, lse) if return_lse else out


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    # fmt: off
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None,
                 jit_kwargs=None) -> None:
        assert not use_cuda_graph
        self._init(float_workspace_buffer, kv_layout, backend)

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
             packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
             window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
             q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
             token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None,
             disable_split_kv=False, seq_lens: Any = None, seq_lens_q=None, max_token_per_sequence=None,
             max_sequence_kv=None, v_indptr=None, o_indptr=None) -> None:
        # fmt: on
        self._plan((qo_indptr, kv_indptr), causal=causal, heads=num_qo_heads, kv_heads=num_kv_heads,
                   head_dim=head_dim_qk, window_left=window_left, cap=logits_soft_cap, scale=sm_scale,
                   q_dtype=q_data_type, kv_dtype=kv_data_type)  # fmt: skip
        self.starts, self.key_starts = qo_indptr, kv_indptr

    # fmt: off
    def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, kv_cache_sf=None) -> Any:
        # fmt: on
        assert k_scale is None and v_scale is None, "ignored for 16-bit keys"
        assert len(k) == len(v) == int(self.key_starts[-1]) and len(q) == int(self.starts[-1])
        pairs = [(a, k[b], v[b]) for a, b in zip(_slices(self.starts), _slices(self.key_starts), strict=True)]
        return self._run(q, pairs, {**locals(), "window_left": None})
