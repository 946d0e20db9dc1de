"""TRITON: our own Triton kernels, on any GPU that Triton compiles for."""

from __future__ import annotations

from functools import cache

import torch

from ...formats.mla_rows.deepseek import DS_MLA
from ...formats.mla_rows.format import LATENT_DTYPES
from ...formats.registry import FORMATS
from ...kernels.mla_decode.plan import MAX_LATENT_DIM, MAX_ROPE_DIM
from ...runtime import triton_versions
from ...runtime.op_registry import interpreted
from ...spec import AttentionSpec, AttentionType, GraphLevel
from ...spec.capabilities import Capabilities, IntRange, Rejection
from ...spec.mask import KERNEL_FEATURES
from ..base import AttentionBackend, Availability
from ..op_backend import OpAttentionImpl
from .metadata import TritonMetadataBuilder, why_not_hopper, why_not_hopper_latent


class TritonImpl(OpAttentionImpl):
    path = "triton"


_LEADING_HEAD_DIMS = (64, 80, 112, 128, 160, 256)  # of prompts on Hopper: bench/results/h200/dims.json


class TritonBackend(AttentionBackend):
    """A kernel for sequences of few new tokens, whose keys are shared out over the GPU, and one for the others, a
    different one on Hopper."""

    name = "TRITON"
    builder = TritonMetadataBuilder
    impl = TritonImpl

    @classmethod
    @cache
    def availability(cls) -> Availability:
        found = triton_versions.installed()
        if found is None:
            return Availability(ok=False, reason="triton is not installed", hint="pip install triton")
        reason = triton_versions.why_untried()
        return Availability(True, found, reason, triton_versions.REMEDY if reason else "")

    @classmethod
    @cache
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=("cuda", "cpu") if interpreted() else ("cuda",),
            min_capability=(8, 0),
            dtypes=(torch.float32, torch.float16, torch.bfloat16),
            head_dims=IntRange(1, 512),
            kv_cache_dtypes=tuple(FORMATS),
            kv_scales=("none", "float", "tensor", "head"),
            any_head_dim_v=True,
            latent_dims=IntRange(1, MAX_LATENT_DIM),
            rope_dims=IntRange(0, MAX_ROPE_DIM),
            latent_kv_cache_dtypes=LATENT_DTYPES,
            block_sizes=IntRange(1, 1024),
            cache_layouts=("NHD", "HND"),
            gqa_ratios=IntRange(),
            attn_types=tuple(AttentionType),
            non_causal=True,
            masks=KERNEL_FEATURES,
            softcap=True,
            alibi=True,
            sinks=True,
            lse=True,
            fp8_products=True,
            deterministic=True,
            compile=True,
            graph_level=GraphLevel.ALWAYS,
        )

    @classmethod
    def is_fastest_for(cls, phase: str, spec: AttentionSpec) -> bool:
        if spec.latent_dim is not None:
            return not why_not_hopper_latent(spec)  # kernels/mla_decode/README.md
        # Of other head dims, and of packed keys, FlashAttention's kernels are as fast or faster, or were not measured.
        leads = spec.uses_cache and spec.head_dim in _LEADING_HEAD_DIMS
        return phase == "prefill" and leads and not why_not_hopper(spec)

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        out = super().rejections(spec)
        if interpreted() and spec.dtype == torch.bfloat16:
            hint = "the interpreter computes on bfloat16's bit pattern; unset TRITON_INTERPRET or use float32"
            out.append(Rejection("dtype", "bfloat16", "float32, float16 under TRITON_INTERPRET=1", hint))
        older = spec.capability is not None and spec.capability < (8, 9)
        if older and spec.kv_cache_dtype in ("fp8_e4m3", DS_MLA.name):
            others = ("auto", "fp8_e5m2") if spec.latent_dim is None else ("auto",)
            known = f"{', '.join(others)} below sm_89"
            out.append(Rejection("kv_cache_dtype", spec.kv_cache_dtype, known, f"use {others[-1]}"))
        unaligned = spec.head_dim % 16 or spec.value_dim % 16
        if spec.kv_cache_dtype.startswith("fp8") and unaligned and not interpreted():
            hint = "Triton 3.6 compiles fp8 rows of another alignment wrongly (bench/NOTES.md)"
            dims = f"{spec.head_dim}/{spec.value_dim}"
            out.append(Rejection("head_dim", dims, "multiples of 16 over fp8 caches", hint))
        if spec.value_dim > 512 and spec.latent_dim is None:
            out.append(Rejection("head_dim_v", spec.value_dim, "1..512"))
        if spec.latent_dim is not None and spec.deterministic:
            hint = "which programs share a sequence's keys depends on the batch"
            out.append(Rejection("deterministic", True, "none with latent_dim", hint))
        return out
