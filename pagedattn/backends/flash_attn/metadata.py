"""What FlashAttention needs of a step: key starts, and FA3's tile schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UnsupportedError
from ...kernels.packing import offsets, rows_without_keys
from ...spec import AttentionSpec
from ...step.metadata import CommonAttentionMetadata
from ..base import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    Limits,
    check_capture,
    clone_for_capture,
    copy_into_captured,
)
from .versions import FA3, FlashAttnVersion, library, version_for

# FA3 balances at most that many splits of a sequence on the device. Constant: a captured call must fit any lengths.
_DECODE_SPLITS = 32


@dataclass(slots=True)
class FlashAttnMetadata(AttentionMetadata):
    """`decode`: one query row per sequence. `fp8_queries`: over a cache. `schedule`: FA3's scheduler metadata.
    `key_starts`: [B + 1] int32."""

    version: FlashAttnVersion
    decode: bool
    fp8_queries: bool = False
    schedule: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None

    def packed_key_starts(self) -> torch.Tensor:
        """Where each sequence's keys start when all are packed (also FA2's measure of cached keys)."""
        if self.key_starts is None:
            self.key_starts = offsets(self.common.seq_lens)
        return self.key_starts

    def rows_without_keys(self, rows: int, causal: bool) -> torch.Tensor | None:
        """[rows] bool, True where a query sees no key at all; None where the host knows that there is none such."""
        common = self.common
        if common.seq_lens_cpu is not None and common.query_start_loc_cpu is not None:
            queries, keys = common.query_start_loc_cpu.diff(), common.seq_lens_cpu
            if not bool(((queries > 0) & ((keys == 0) | (causal & (queries > keys)))).any()):
                return None
        return rows_without_keys(common.query_start_loc, common.seq_lens, rows, causal)

    @property
    def splits(self) -> int:
        """FA3's num_splits; 0 lets its heuristics choose."""
        return _DECODE_SPLITS if self.decode else 0

    def describe(self) -> str:
        common = self.common
        kind = "decode" if self.decode else f"up to {common.max_query_len} queries"
        kind += ", fp8 queries" if self.fp8_queries else ""
        return f"{self.version.label} via {self.version.module()}, {common.num_seqs} sequences, {kind}"


class FlashAttnBuilder(AttentionMetadataBuilder):
    """FA3 gets its schedule here, once for all layers; FA2 plans nothing."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        super().__init__(spec, device, limits, workspace)
        self._version = version_for(spec)

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if isinstance(into, FlashAttnMetadata):
            return self._rewrite(common, into)
        version = self._version
        if capture:
            check_capture(version.capabilities.graph_level, common)
        rounds = version.capabilities.rounds_queries(self.spec)
        decode = 0 < common.num_decodes == common.num_seqs
        metadata = FlashAttnMetadata(clone_for_capture(common) if capture else common, version, decode, rounds)
        # Without a block size the cache is unknown yet, and FA3 schedules in each call.
        if version is FA3 and self.spec.block_size and common.num_tokens and common.block_table.shape[1]:
            metadata.schedule = _schedule(self.spec, metadata.common, metadata.splits)
        if capture and version.number == 2 and not decode:
            metadata.packed_key_starts()
        return metadata

    def _rewrite(self, common: CommonAttentionMetadata, into: FlashAttnMetadata) -> FlashAttnMetadata:
        if into.decode and into.version.number == 2 and not _rows_are_sequences(common):
            raise UnsupportedError(
                "FA2 replays decodes whose row b is of sequence b; sort sequences without a new token last"
            )
        copy_into_captured(into.common, common)
        if into.key_starts is not None:
            into.key_starts.copy_(offsets(into.common.seq_lens))
        if into.schedule is not None:
            into.schedule.copy_(_schedule(self.spec, into.common, into.splits))
        return into


def _rows_are_sequences(common: CommonAttentionMetadata) -> bool:
    """Whether sequences with one new token come first and the others have none, as far as the host knows."""
    if common.query_start_loc_cpu is None:
        return common.num_decodes == common.num_seqs
    queries = common.query_start_loc_cpu.diff()
    return bool((queries[1:] <= queries[:-1]).all())


def window_size(spec: AttentionSpec) -> tuple[int, int]:
    """Keys left and right of a token, -1 for all: a window of W keeps W - 1 beside the token itself."""
    if spec.sliding_window is None:
        return -1, -1
    left = spec.sliding_window - 1
    return left, 0 if spec.causal else left


def _schedule(spec: AttentionSpec, common: CommonAttentionMetadata, splits: int) -> torch.Tensor:
    """FA3's tile schedule; its arguments must be those of the attention call."""
    size = spec.block_size or 0
    return library(FA3).get_scheduler_metadata(
        common.num_seqs,
        max(common.max_query_len, 1),
        common.block_table.shape[1] * size,
        spec.num_heads,
        spec.kv_heads,
        spec.rope_dim if spec.latent_dim else spec.head_dim,
        common.seq_lens,
        headdim_v=spec.latent_dim,
        qkv_dtype=spec.stored_dtype,
        cu_seqlens_q=common.query_start_loc,
        page_size=size,
        causal=bool(spec.causal),
        window_size=window_size(spec),
        has_softcap=spec.softcap is not None,
        num_splits=splits,
    )
