"""Two backends for one batch: one for its decodes, one for the rest, behind the same builder and implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ..errors import CapacityError, InvalidInputError, UnsupportedError
from ..formats.base import LayerCache
from ..ops.attention_replay import AttentionReplay
from ..ops.write_replay import WriteReplay
from ..spec import AttentionSpec, Scale
from ..step.metadata import CommonAttentionMetadata
from .base import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    Limits,
    rewrite_static,
    static_copy,
)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step, and their metadata for the backend of one phase."""

    phase: str
    rows: slice
    metadata: AttentionMetadata


@dataclass(slots=True)
class CompositeMetadata(AttentionMetadata):
    """The parts of a step. `whole` plans all of it for the prefill backend, which packed keys need."""

    parts: tuple[Part, ...]
    whole: Callable[[], AttentionMetadata]
    captured: bool = False

    @property
    def shares_prefix(self) -> bool:
        return any(part.metadata.shares_prefix for part in self.parts)

    def describe(self) -> str:
        return ", ".join(f"{part.phase}: {part.metadata.describe()}" for part in self.parts)


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
        shared = (spec, device, limits, workspace)
        self._builders = {"prefill": prefill.builder(*shared), "decode": decode.builder(*shared)}

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if isinstance(into, CompositeMetadata):
            return self._rewrite(common, into)
        split, total = common.num_decodes, common.num_seqs
        spans = [("decode", 0, split)] if split else []
        if split < total or not split:
            spans.append(("prefill", split, total))
        parts = []
        for phase, first, last in spans:
            metadata = self._builders[phase].build(slice_sequences(common, first, last), None, capture)
            parts.append(Part(phase, slice(first, last) if phase == "decode" else slice(first, None), metadata))
        mine = static_copy(common) if capture else common
        return CompositeMetadata(mine, tuple(parts), cache(lambda: self._builders["prefill"].build(common)), capture)

    def _rewrite(self, common: CommonAttentionMetadata, into: CompositeMetadata) -> CompositeMetadata:
        first, *rest = into.parts
        split = first.rows.stop if first.phase == "decode" else 0
        if first.phase == "decode" and not rest and common.max_query_len <= 1:  # padding counts as no decode
            common = common.replace(num_decodes=common.num_seqs)
        elif common.num_decodes != split:
            raise CapacityError(
                f"a step of {split} decodes was captured, this one has {common.num_decodes}; capture it"
            )
        ends = (common.num_seqs,) if not rest else (split, common.num_seqs)
        start = 0
        for part, end in zip(into.parts, ends, strict=True):
            self._builders[part.phase].build(slice_sequences(common, start, end), part.metadata)
            start = end
        rewrite_static(into.common, common)
        return into

    def device_update(self, metadata: AttentionMetadata) -> None:
        if isinstance(metadata, CompositeMetadata):
            for part in metadata.parts:
                self._builders[part.phase].device_update(part.metadata)


def slice_sequences(common: CommonAttentionMetadata, first: int, last: int) -> CommonAttentionMetadata:
    """Sequences first..last, a part that is all decodes (one token each) or that follows exactly those."""
    if last - first == common.num_seqs:
        return common
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
        self._impls = {"prefill": prefill.impl(spec), "decode": decode.impl(spec)}
        self.records = any(impl.records for impl in self._impls.values())

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
        if not isinstance(metadata, CompositeMetadata):
            raise InvalidInputError("metadata", "of two backends", type(metadata).__name__, "build it with the layer")
        rest = (sinks, alibi_slopes, q_scale, k_scale, v_scale, return_lse)
        if kv_cache is None and metadata.captured:
            raise UnsupportedError("two backends capture no attention without a cache; name one backend for the layer")
        if kv_cache is None:  # packed keys are not split where the queries are
            return self._impls["prefill"].forward(query, key, value, None, metadata.whole(), out, *rest)
        if len(metadata.parts) == 1:
            (only,) = metadata.parts
            return self._impls[only.phase].forward(query, None, None, kv_cache, only.metadata, out, *rest)
        if out is None:
            out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        lses = []
        for part in metadata.parts:
            impl, rows = self._impls[part.phase], part.rows
            lses.append(impl.forward(query[rows], None, None, kv_cache, part.metadata, out[rows], *rest)[1])
        return out, torch.cat(lses) if return_lse else None

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
        given = (out, sinks, alibi_slopes, k_scale, v_scale)
        if not isinstance(metadata, CompositeMetadata) or len(metadata.parts) != 1:
            return super().record(query, kv_cache, metadata, *given)
        (only,) = metadata.parts
        return self._impls[only.phase].record(query, kv_cache, only.metadata, *given)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        *,
        replays: list[WriteReplay] | None = None,
    ) -> None:
        given = (key, value, kv_cache, slot_mapping, k_scale, v_scale)
        writer = self._impls["prefill"]
        if replays is None or type(writer).write_kv is not AttentionImpl.write_kv:
            writer.write_kv(*given)
        else:
            writer.write_kv(*given, replays=replays)


def make_impl(prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> AttentionImpl:
    """The implementation for a selection of one backend or of two (one, where no cache is there to decode from)."""
    return prefill.impl(spec) if _is_single(prefill, decode, spec) else CompositeImpl(prefill, decode, spec)


def make_builder(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec, device: torch.device
) -> AttentionMetadataBuilder:
    """The metadata builder for a selection of one backend or of two."""
    if _is_single(prefill, decode, spec):
        return prefill.builder(spec, device)
    return CompositeBuilder(prefill, decode, spec, device)


def _is_single(prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> bool:
    return prefill is decode or not spec.uses_cache
