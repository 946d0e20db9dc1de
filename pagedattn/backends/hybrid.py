"""Two backends for one batch: one for its decodes, one for the rest, behind the same builder and implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ..call import AttentionCall
from ..errors import CapacityError, InvalidInputError, UnsupportedError
from ..spec import AttentionSpec
from ..step.metadata import CommonAttentionMetadata
from .base import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    Limits,
    clone_for_capture,
    copy_into_captured,
)
from .recent import RecentBuilder, RecentImpl


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
        mine = clone_for_capture(common) if capture else common
        whole = cache(lambda: self._builders["prefill"].build(common))
        plan = parts[0].metadata.plan if len(parts) == 1 else None
        return CompositeMetadata(mine, tuple(parts), whole, capture, plan=plan)

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
        copy_into_captured(into.common, common)
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
        recent_table=None if common.recent_table is None else common.recent_table[first:last],
        slot_mapping=common.slot_mapping[first : first + tokens],
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=None if common.seq_lens_cpu is None else common.seq_lens_cpu[first:last],
        num_seqs=last - first,
        num_tokens=tokens,
        max_query_len=1 if first == 0 else common.max_query_len,
        num_decodes=last if first == 0 else 0,
    )


class CompositeImpl(AttentionImpl):
    """Runs either part on its rows of query and output; the prefill backend writes."""

    def __init__(self, prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._impls = {"prefill": prefill.impl(spec), "decode": decode.impl(spec)}
        self.write_kv = self._impls["prefill"].write_kv

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        if not isinstance(metadata, CompositeMetadata):
            raise InvalidInputError("metadata", "of two backends", type(metadata).__name__, "build it with the layer")
        if call.kv_cache is None:  # packed keys are not split where the queries are
            if metadata.captured:
                raise UnsupportedError("capture without a KV cache takes a single backend; name one for the layer")
            return self._impls["prefill"].forward(call, metadata.whole())
        if len(metadata.parts) == 1:
            (only,) = metadata.parts
            return self._impls[only.phase].forward(call, only.metadata)
        out, lse = call.output(self.spec.value_dim), call.lse
        for part in metadata.parts:
            rows = part.rows
            mine = call._replace(query=call.query[rows], out=out[rows], lse=None if lse is None else lse[rows])
            self._impls[part.phase].forward(mine, part.metadata)
        return out


def make_impl(prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> AttentionImpl:
    """The implementation for a selection of one backend or of two (one, where no cache is there to decode from)."""
    if spec.has_recent:
        return RecentImpl(lambda part: make_impl(prefill, decode, part), spec)
    return prefill.impl(spec) if _is_single(prefill, decode, spec) else CompositeImpl(prefill, decode, spec)


def make_builder(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec, device: torch.device
) -> AttentionMetadataBuilder:
    """The metadata builder for a selection of one backend or of two."""
    if spec.has_recent:
        return RecentBuilder(lambda part: make_builder(prefill, decode, part, device), spec, device)
    if _is_single(prefill, decode, spec):
        return prefill.builder(spec, device)
    return CompositeBuilder(prefill, decode, spec, device)


def _is_single(prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> bool:
    return prefill is decode or not spec.uses_cache
