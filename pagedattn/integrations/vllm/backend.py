"""What vLLM asks of an attention backend before it builds a model: facts, and reasons against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from .builder import PagedAttentionBuilder
from .impl import PagedAttentionImpl
from .kernels import FP8, INT8, TYPES, capability_of, int8_row_bytes, serving_backend, why_not
from .refusals import explained


class PagedAttentionBackend(AttentionBackend):
    """vLLM's `CUSTOM`. Head dimensions, compute capabilities and the like are refused by `supports_combination`, with
    the reasons that the library's own selection gives; what vLLM asks besides, as `explained`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", *FP8),
        *([INT8] if hasattr(AttentionBackend, "customize_spec") else []),
    ]
    # In one op, which cuts the compiled graph once per layer.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionBuilder]:
        return PagedAttentionBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        # Powers of two, which the Hopper kernel wants: vLLM cuts its blocks (784 tokens of a hybrid model) into these.
        return [16, 32, 64, 128, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """For releases that ask; later ones have one shape for all backends."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks outermost, so that vLLM may pad pages and interleave layers: strides are followed."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout  # type: ignore[attr-defined]

        nhd = get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 2, 3, 4, 5) if nhd else (1, 4, 0, 2, 3, 5)
        return (0, 1, 2, 3, 4) if nhd else (0, 1, 3, 2, 4)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Later releases ask for the bytes of a row: of int8 caches those that `views` reads. vLLM's own backend puts
        each scale behind its codes, where rows of 128 elements begin at odd multiples of 4 bytes."""
        if spec.kv_quant_mode.name != INT8.upper() or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=int8_row_bytes(spec.head_size))

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """vLLM's reasons against a layer, with what is served instead and what to do."""
        return [explained(reason, asked) for reason in super().validate_configuration(**asked)]

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if use_mla:  # has been said
            return None
        return why_not(head_size, dtype, kv_cache_dtype, has_sink, capability_of(device_capability))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return serving_backend() == "TRITON"

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in TYPES

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Which sequences decode is counted on the host.
        return False
