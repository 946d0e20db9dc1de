"""What the backends over `ops.paged_attention` and `ops.mla_decode` share, which differ in path and capabilities."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .. import ops
from ..call import AttentionCall
from ..errors import InvalidInputError
from ..spec import GraphLevel
from ..step.metadata import CommonAttentionMetadata
from .base import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    check_capture,
    check_matches_spec,
    clone_for_capture,
    copy_into_captured,
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
            return AttentionMetadata(clone_for_capture(common) if capture else common)
        copy_into_captured(into.common, common)
        return into


class OpAttentionImpl(AttentionImpl):
    """Attention by `ops.paged_attention`, latent attention by `ops.mla_decode`, on one path."""

    path: ClassVar[str]

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        check_matches_spec(self.spec, call)
        if self.spec.latent_dim is not None:
            return self._attend_latent(self.spec.latent_dim, call, metadata)
        return self._attend(call, metadata)

    def accumulates(self, metadata: AttentionMetadata) -> bool:
        return metadata.plan is None or metadata.plan.accumulates

    def accumulate(self, call: AttentionCall, metadata: AttentionMetadata, prior: torch.Tensor | None = None) -> None:
        check_matches_spec(self.spec, call)
        self._attend(call, metadata, accumulate=True, prior=prior)

    def _attend(self, call: AttentionCall, metadata: AttentionMetadata, **added: Any) -> torch.Tensor:
        common, spec, cache, (key, value) = metadata.common, self.spec, call.kv_cache, call.keys_and_values
        return ops.paged_attention(
            call.query,
            key,
            value,
            None if cache is None else common.block_table,
            common.query_start_loc,
            common.seq_lens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=spec.softmax_scale,
            mask=spec.mask,
            softcap=spec.softcap,
            num_decodes=common.num_decodes,
            sinks=call.sinks,
            alibi_slopes=call.alibi_slopes,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            out=call.output(spec.value_dim),
            lse=call.lse,
            deterministic=spec.deterministic,
            path=self.path,
            plan=metadata.plan,
            **added,
            **({} if cache is None else cache.stored),
        )

    def _attend_latent(self, latent_dim: int, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        """Absorbed latent attention, by `ops.mla_decode`."""
        common, spec, cache = metadata.common, self.spec, call.kv_cache
        if cache is None:
            raise InvalidInputError("kv_cache", "a cache of latent rows", "None", "attend to expanded keys and values")
        return ops.mla_decode(
            call.query,
            cache.key,
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            latent_dim=latent_dim,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=spec.softmax_scale,
            mask=spec.mask,
            softcap=spec.softcap,
            k_scale=call.k_scale,
            out=call.out,
            lse=call.lse,
            plan=metadata.mla_plan,
            path=self.path,
        )
