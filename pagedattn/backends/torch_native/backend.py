"""TORCH: plain torch on any device, every feature, every head dimension; the backend that is always there."""

from __future__ import annotations

import torch

from ...formats.mla_rows.format import LATENT_DTYPES
from ...formats.registry import FORMATS
from ...spec import AttentionType
from ...spec.capabilities import Capabilities, IntRange
from ...spec.mask import ALL_FEATURES
from ..base import AttentionBackend, Availability
from ..op_backend import OpAttentionImpl, OpMetadataBuilder


class TorchImpl(OpAttentionImpl):
    path = "torch"


class TorchBackend(AttentionBackend):
    """Batched gather, matmul and softmax."""

    name = "TORCH"
    builder = OpMetadataBuilder
    impl = TorchImpl

    @classmethod
    def availability(cls) -> Availability:
        return Availability(ok=True, version=torch.__version__)

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=("cpu", "cuda", "mps", "xpu"),
            dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            head_dims=IntRange(),
            kv_cache_dtypes=tuple(FORMATS),
            kv_scales=("none", "float", "tensor", "head"),
            any_head_dim_v=True,
            latent_dims=IntRange(),
            rope_dims=IntRange(0),
            latent_kv_cache_dtypes=LATENT_DTYPES,
            block_sizes=IntRange(),
            cache_layouts=("NHD", "HND"),
            attn_types=tuple(AttentionType),
            non_causal=True,
            masks=ALL_FEATURES,
            softcap=True,
            alibi=True,
            sinks=True,
            lse=True,
            compile=True,
        )
