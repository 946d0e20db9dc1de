"""Latent attention (MLA) inside vLLM: decodes by the library, over vLLM's rows as they are. What leads there, from
projections to prompts and the writing of rows, stays vLLM's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ... import AttentionMetadata, AttentionSpec, CommonAttentionMetadata, ops, select_backend
from ...errors import UnsupportedError
from .kernels import capability_of, latent_spec, serving_backend, why_not_latent
from .refusals import explained


class PagedMLABackend(MLACommonBackend):
    """vLLM's `CUSTOM` for models with latent attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedMLAImpl]:
        return PagedMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMLABuilder]:
        return PagedMLABuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks outermost, for releases that ask."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True  # see supports_combination

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
        return why_not_latent(head_size, dtype, kv_cache_dtype, capability_of(device_capability))


class PagedMLABuilder(MLACommonMetadataBuilder[Any]):
    """vLLM's metadata, whose `decode.planned` is the library's for the step's decodes: planned for the step, or that
    which the full graph was captured with that will be replayed for it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        spec: AttentionSpec = self._layer.impl.spec
        self._absorbed = select_backend(spec, serving_backend()).decode.builder(spec, device)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, ...], AttentionMetadata] = {}
        self._capturing = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support if serving_backend() == "TRITON" else AttentionCGSupport.NEVER

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def _build_decode(self, **given: Any) -> Any:
        decode = super()._build_decode(**given)
        starts, lens, table = given["query_start_loc_device"], decode.seq_lens, decode.block_table
        count, tokens = len(lens), given["num_decode_tokens"]
        ends = given["query_start_loc_cpu"].numpy()[: count + 1]
        longest = int((ends[1:] - ends[:-1]).max())
        key = (count, tokens, longest, starts.data_ptr(), lens.data_ptr(), table.data_ptr())
        planned = self._captured.get(key)
        if planned is None:
            common = CommonAttentionMetadata(
                query_start_loc=starts[: count + 1],
                seq_lens=lens,
                block_table=table,
                slot_mapping=self._no_slots,  # rows are written by vLLM
                num_seqs=count,
                num_tokens=tokens,
                max_query_len=longest,
                max_seq_len=given["max_seq_len"],
                num_decodes=count if longest <= 1 else 0,
                block_size=self.kv_cache_spec.block_size,
            )
            planned = self._absorbed.build(common)
        decode.planned = planned
        if self._capturing and key not in self._captured:
            self._captured[key] = planned
            self._launch_once(planned)
        return decode

    def _launch_once(self, planned: AttentionMetadata) -> None:
        """Compile and load what a graph is about to record."""
        cache, spec = self._layer.kv_cache, self._layer.impl.spec
        if cache.is_cuda and cache.numel():
            shape = planned.common.num_tokens, spec.num_heads, spec.head_dim
            self._layer.impl.attend(torch.zeros(shape, dtype=spec.dtype, device=cache.device), cache, planned)


class PagedMLAImpl(MLACommonImpl[Any]):
    """Absorbed attention of decodes.

    Raises:
        UnsupportedError: a layer that cannot be served; lists the reasons.
    """

    can_return_lse_for_decode: bool = False  # so that vLLM refuses decode context parallelism

    def __init__(self, num_heads: int, head_size: int, scale: float, *others: Any, **more: Any) -> None:
        super().__init__(num_heads, head_size, scale, *others, **more)
        given = {name: more.get(name) for name in ("alibi_slopes", "sliding_window", "logits_soft_cap", "indexer")}
        asked = {name: value for name, value in given.items() if value is not None}
        if asked:
            raise UnsupportedError(f"pagedattn serves no MLA layer with {asked}; start vLLM with another backend")
        self.spec = latent_spec(num_heads, head_size, self.kv_lora_rank, float(scale), torch.get_default_dtype())

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the step's decodes.

        Args:
            q: [T, Hq, L + R], or its two parts. kv_c_and_k_pe_cache: [P, S, L + R] of vLLM 0.24, [P, 1, S, L + R] of
                later ones.

        Returns:
            [T, Hq, L], and no LSE.
        """
        query = q if isinstance(q, torch.Tensor) else torch.cat(q, dim=-1)
        return self.attend(query, kv_c_and_k_pe_cache, attn_metadata.decode.planned), None

    def attend(self, query: torch.Tensor, cache: torch.Tensor, planned: AttentionMetadata) -> torch.Tensor:
        """The output [T, Hq, L] for absorbed queries [T, Hq, L + R]."""
        common = planned.common
        return ops.mla_decode(
            query,
            cache.unsqueeze(2) if cache.dim() == 3 else cache.transpose(1, 2),
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            latent_dim=self.kv_lora_rank,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=self.scale,
            plan=planned.mla_plan,
            path=serving_backend().lower(),
        )
