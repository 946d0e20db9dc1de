"""Two backends for one batch: one for its decodes, one for the rest, behind the same builder and implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, Limits
from .kv_cache import LayerCache
from .metadata import CommonAttentionMetadata
from .spec import AttentionSpec


@dataclass(slots=True)
class CompositeMetadata(AttentionMetadata):
    """Metadata of either part; None where a batch has no such part. `whole` plans all of it for the prefill backend."""

    decode: AttentionMetadata | None
    prefill: AttentionMetadata | None
    whole: Callable[[], AttentionMetadata]

    def describe(self) -> str:
        parts = (("decode", self.decode), ("prefill", self.prefill))
        return ", ".join(f"{name}: {part.describe()}" for name, part in parts if part is not None)


class CompositeBuilder(AttentionMetadataBuilder):
    """Splits a decodes-first batch; one without decodes in front goes whole to the prefill backend."""

    def __init__(
        self,
        prefill: type[AttentionBackend],
        decode: type[AttentionBackend],
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        super().__init__(spec, device, limits, workspace)
        self._prefill = prefill.builder(spec, device, limits, workspace)
        self._decode = decode.builder(spec, device, limits, workspace)

    def build(self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None) -> AttentionMetadata:
        old = (into.decode, into.prefill) if isinstance(into, CompositeMetadata) else (None, None)
        split, total = common.num_decodes, common.num_seqs
        decode = prefill = None
        if split:
            decode = self._decode.build(slice_sequences(common, 0, split) if split < total else common, old[0])
        if split < total:
            prefill = self._prefill.build(slice_sequences(common, split, total) if split else common, old[1])
        return CompositeMetadata(common, decode, prefill, lambda: self._prefill.build(common))

    def device_update(self, metadata: AttentionMetadata) -> None:
        if isinstance(metadata, CompositeMetadata):
            for builder, part in ((self._decode, metadata.decode), (self._prefill, metadata.prefill)):
                if part is not None:
                    builder.device_update(part)


def slice_sequences(common: CommonAttentionMetadata, first: int, last: int) -> CommonAttentionMetadata:
    """Sequences first..last, a part that is all decodes (one token each) or that follows exactly those."""
    tokens = last if first == 0 else common.num_tokens - first
    starts = common.query_start_loc[first : last + 1]
    starts_cpu = None if common.query_start_loc_cpu is None else common.query_start_loc_cpu[first : last + 1] - first
    return common.replace(
        query_start_loc=starts - first if first else starts,
        seq_lens=common.seq_lens[first:last],
        block_table=common.block_table[first:last],
        slot_mapping=common.slot_mapping[first : first + tokens],
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=None if common.seq_lens_cpu is None else common.seq_lens_cpu[first:last],
        num_seqs=last - first,
        num_tokens=tokens,
        max_query_len=1 if first == 0 else common.max_query_len,
        num_decodes=last if first == 0 else 0,
    )


class CompositeImpl(AttentionImpl):
    """Runs either part on its rows of query and output."""

    def __init__(self, prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._prefill, self._decode = prefill.impl(spec), decode.impl(spec)

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
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(metadata, CompositeMetadata):
            raise TypeError(
                f"metadata must be CompositeMetadata, got {type(metadata).__name__}; build it with the layer"
            )
        rest = (sinks, alibi_slopes, q_scale, k_scale, v_scale, return_lse)
        if kv_cache is None:  # packed keys are not split where the queries are
            return self._prefill.forward(query, key, value, None, metadata.whole(), out, *rest)
        if metadata.prefill is None and metadata.decode is not None:
            return self._decode.forward(query, None, None, kv_cache, metadata.decode, out, *rest)
        if metadata.decode is None or metadata.prefill is None:
            return self._prefill.forward(query, None, None, kv_cache, metadata.prefill or metadata.whole(), out, *rest)
        if out is None:
            out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        split = metadata.common.num_decodes
        _, head = self._decode.forward(query[:split], None, None, kv_cache, metadata.decode, out[:split], *rest)
        _, tail = self._prefill.forward(query[split:], None, None, kv_cache, metadata.prefill, out[split:], *rest)
        return out, torch.cat((head, tail)) if head is not None and tail is not None else None

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        self._prefill.write_kv(key, value, kv_cache, slot_mapping, k_scale, v_scale)
