"""What the backends over `ops.paged_attention` share; they differ in the path and in what they serve."""

from __future__ import annotations

from typing import ClassVar

import torch

from .. import ops
from ..errors import InvalidInputError
from ..formats.base import LayerCache
from ..ops.attention_plan import LaunchPlan
from ..ops.attention_replay import AttentionReplay
from ..spec import GraphLevel, Scale
from ..step.metadata import CommonAttentionMetadata
from .base import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    check_announced,
    check_capture,
    rewrite_static,
    static_copy,
)


class OpMetadataBuilder(AttentionMetadataBuilder):
    """The op reads lengths and tables on the device: there is nothing to plan. `graph_level`: as the backend states."""

    graph_level: ClassVar[GraphLevel] = GraphLevel.NEVER

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if capture:
            check_capture(self.graph_level, common)
        if into is None:
            return AttentionMetadata(static_copy(common) if capture else common)
        rewrite_static(into.common, common)
        return into


class OpAttentionImpl(AttentionImpl):
    """Attention by `ops.paged_attention` on one path."""

    path: ClassVar[str]

    def planned(self, metadata: AttentionMetadata) -> LaunchPlan | None:
        """The plan that the metadata carry, None where the op is to make one."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: LayerCache | None,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = (out, sinks, alibi_slopes, q_scale, k_scale, v_scale)
        return self._attend(query, key, value, kv_cache, metadata, *given, return_lse, None)

    def record(
        self,
        query: torch.Tensor,
        kv_cache: LayerCache,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> AttentionReplay | None:
        replays: list[AttentionReplay] = []
        given = (out, sinks, alibi_slopes, None, k_scale, v_scale)
        self._attend(query, None, None, kv_cache, metadata, *given, False, replays)
        return replays[0] if replays else None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: LayerCache | None,
        metadata: AttentionMetadata,
        out: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
        return_lse: bool,
        replays: list[AttentionReplay] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        common, spec = metadata.common, self.spec
        check_announced(spec, sinks, alibi_slopes, q_scale)
        keys, values = (key, value) if kv_cache is None else (kv_cache.key, kv_cache.value)
        if keys is None or values is None:
            raise InvalidInputError("key and value", "given where there is no kv_cache", "None")
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device) if return_lse else None
        out = ops.paged_attention(
            query,
            keys,
            values,
            None if kv_cache is None else common.block_table,
            common.query_start_loc,
            common.seq_lens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=spec.softmax_scale,
            causal=bool(spec.causal),
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            num_decodes=common.num_decodes,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            mask_mod=spec.mask_mod,
            deterministic=spec.deterministic,
            path=self.path,
            replays=replays,
            plan=self.planned(metadata),
        )
        return out, lse
