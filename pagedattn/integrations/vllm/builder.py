"""The metadata builder that vLLM has for each KV group and spec, over one builder of the library per kind of layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from ... import CommonAttentionMetadata, LayerCache, plan_step
from .kernels import serving_backend
from .step import StepPlans, convert, graph_key

_PROMPT = 256  # tokens


class PagedAttentionBuilder(AttentionMetadataBuilder[Any]):
    """Plans a step, or finds the plan of the full graph that will be replayed for it.

    A graph records kernels over vLLM's own persistent tensors, so that nothing is copied before a replay. The plan that
    it was captured with is kept, since it owns what the kernels use besides, and is found by the step's shape.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = 1  # decodes in front; the second model runner sorts by itself

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size  # of the kernel: a part of the cache manager's, perhaps
        context = vllm_config.compilation_config.static_forward_context
        # A group may hold layers with a window and without, which are planned apart.
        self._layers = {context[name].impl.attention.plan_key: context[name] for name in layer_names}
        self._attention = [layer.impl.attention for layer in self._layers.values()]
        self._caches: dict[object, tuple[torch.Tensor, LayerCache]] = {}
        self._captured: dict[tuple[int, ...], StepPlans] = {}
        self._capturing = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support if serving_backend() == "TRITON" else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepPlans:
        key = graph_key(common_attn_metadata)
        known = self._captured.get(key)
        if known is not None:
            known.update(self._attention)
            return known
        # Not by `capture=True`, which would clone what vLLM rewrites. For a graph max_seq_len is max_model_len.
        common = convert(common_attn_metadata, self.block_size, common_prefix_len)
        plans = self._plan(common)
        if self._capturing:
            if not self._captured:  # once: else the first request would wait for compilers
                self._launch_once(self._plan(self._mixed_step()))
            self._launch_once(plans)
            self._captured[key] = plans
        return plans

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepPlans:
        # By way of `build`, which vLLM's wrappers override.
        self._capturing = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._capturing = False

    def _plan(self, common: CommonAttentionMetadata) -> StepPlans:
        step = plan_step(self._attention, common)
        return StepPlans(step, common.slot_mapping, self._caches)

    def _mixed_step(self) -> CommonAttentionMetadata:
        """A decode and a prompt over the null block, written nowhere."""
        integers = {"dtype": torch.int32, "device": self.device}
        return CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 1, 1 + _PROMPT], **integers),
            seq_lens=torch.tensor([_PROMPT, _PROMPT], **integers),
            block_table=torch.zeros(2, -(-_PROMPT // self.block_size), **integers),
            slot_mapping=torch.full((1 + _PROMPT,), -1, device=self.device),
            num_seqs=2,
            num_tokens=1 + _PROMPT,
            max_query_len=_PROMPT,
            max_seq_len=_PROMPT,
            num_decodes=1,
            block_size=self.block_size,
        )

    def _launch_once(self, plans: StepPlans) -> None:
        """Compile and load what a graph is about to record, or what prompts need; vLLM's warm-ups plan for less."""
        for layer in self._layers.values():
            attention, cache = layer.impl.attention, layer.kv_cache
            if cache.is_cuda and cache.numel():
                spec, count = attention.spec, plans.of(attention).common.num_tokens
                query = torch.zeros(count, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=cache.device)
                layer.impl.forward(layer, query, None, None, cache, plans, torch.empty_like(query))
