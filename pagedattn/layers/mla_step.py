"""What a step of latent attention (MLA) does: which sequences are attended to absorbed, which expanded, and in what
pieces the latter's keys are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from ..backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from ..errors import InvalidInputError
from ..spec import AttentionSpec
from ..step.metadata import CommonAttentionMetadata
from .mla_pieces import ExpandedBytes, Piece, Segments, Span, plan_chunks, plan_pieces


class DenseAttention:
    """Builders and implementations of the expanded form, for any number of heads; made where one is first planned."""

    def __init__(
        self, backend: type[AttentionBackend], specs: Mapping[bool, AttentionSpec], device: torch.device
    ) -> None:
        """specs: of all heads, by whether attention is causal."""
        self._backend, self._specs, self._device = backend, specs, device
        self._made: dict[tuple[bool, int], tuple[AttentionMetadataBuilder, AttentionImpl]] = {}

    @property
    def num_heads(self) -> int:
        return self._specs[True].num_heads

    def plan(self, causal: bool, heads: int, common: CommonAttentionMetadata) -> DenseCall:
        """Attention of `heads` heads at once over a step without a cache."""
        if (causal, heads) not in self._made:
            spec = self._specs[causal].replace(num_heads=heads)
            self._made[causal, heads] = self._backend.builder(spec, self._device), self._backend.impl(spec)
        builder, impl = self._made[causal, heads]
        return DenseCall(causal, impl, builder.build(common))


class DenseCall(NamedTuple):
    """Attention of all query rows of a piece to the keys of a chunk: causal, or to all of them."""

    causal: bool
    impl: AttentionImpl
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class KeyChunk:
    """Keys that are gathered and expanded at once: of each sequence those from `starts` on, `cu_lens` apart."""

    num_keys: int
    cu_lens: torch.Tensor  # [B' + 1] int32
    starts: torch.Tensor  # [B'] int32
    calls: tuple[DenseCall, ...]


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Rows of a step that are attended to expanded, so many heads at once, chunk of keys by chunk."""

    first_row: int
    num_rows: int
    heads: int
    block_table: torch.Tensor  # of their sequences
    chunks: tuple[KeyChunk, ...]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass
class MLAMetadata(AttentionMetadata):
    """The first rows of a step are attended to absorbed, `first_row` and later ones expanded, piece by piece. `packed`
    is of a step without a cache: causal attention to its own keys, expanded."""

    absorbed: AttentionMetadata | None = None
    first_row: int = 0
    num_rows: int = 0  # of the expanded part
    pieces: tuple[ExpandedRows, ...] = field(default=(), repr=False)
    packed: DenseCall | None = None

    def describe(self) -> str:
        if self.packed is not None:
            return f"expanded, without a cache: {self.packed.metadata.describe()}"
        parts = [] if self.absorbed is None else [f"absorbed: {self.absorbed.describe()}"]
        if self.num_rows:
            chunks = [chunk for piece in self.pieces for chunk in piece.chunks]
            keys, heads = sum(chunk.num_keys for chunk in chunks), max(piece.heads for piece in self.pieces)
            text = f"expanded: {self.num_rows} tokens, {keys} keys in {len(chunks)} chunks, {heads} heads at once"
            parts.append(text + (f", {len(self.pieces)} pieces of rows" if len(self.pieces) > 1 else ""))
        return ", ".join(parts) or "nothing to do"


class MLAMetadataBuilder(AttentionMetadataBuilder):
    """Leading sequences of at most `most_absorbed` new tokens are absorbed, the others expanded, cut by `plan_pieces`
    into what allocates at most `workspace_bytes`. Captured steps are absorbed whole: how they are cut depends on
    lengths. A step without block tables has no cache.

    It needs lengths on the host where there are longer sequences; where the step does not bring them, it waits for the
    device and copies them.
    """

    def __init__(
        self,
        absorbed: AttentionMetadataBuilder,
        dense: DenseAttention,
        most_absorbed: int,
        size: ExpandedBytes,
        workspace_bytes: int,
    ) -> None:
        super().__init__(absorbed.spec, absorbed.device, absorbed.limits)
        self._absorbed, self._dense, self._most_absorbed = absorbed, dense, most_absorbed
        self._size, self._workspace_bytes = size, workspace_bytes

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if into is not None:
            if not isinstance(into, MLAMetadata) or into.absorbed is None or into.num_rows:
                raise InvalidInputError("into", "captured metadata of a latent layer", into.describe())
            self._absorbed.build(common, into.absorbed)
            return into
        if not (capture or common.block_table.shape[1]):
            return MLAMetadata(common, packed=self._dense.plan(True, self._dense.num_heads, common))
        if capture or common.max_query_len <= self._most_absorbed:
            whole = self._absorbed.build(common, None, capture)
            return MLAMetadata(whole.common, absorbed=whole)
        query_lens, seq_lens = _lengths(common)
        split = next((i for i, n in enumerate(query_lens) if n > self._most_absorbed), len(query_lens))
        first_row, rest = sum(query_lens[:split]), query_lens[split:]
        part = leading(common, split, query_lens, seq_lens)
        absorbed = None if part is None else self._absorbed.build(part)
        seen = [total if new else 0 for new, total in zip(rest, seq_lens[split:], strict=True)]
        heads, most = self._dense.num_heads, self._workspace_bytes
        plan = plan_pieces(rest, seen, heads, self._size, most) if sum(rest) else []
        pieces = tuple(self._piece(one, first_row, common.block_table[split:]) for one in plan)
        return MLAMetadata(common, absorbed, first_row, sum(rest), pieces)

    def device_update(self, metadata: AttentionMetadata) -> None:
        if isinstance(metadata, MLAMetadata) and metadata.absorbed is not None:
            self._absorbed.device_update(metadata.absorbed)

    def _piece(self, piece: Piece, first_row: int, block_table: torch.Tensor) -> ExpandedRows:
        table = block_table[piece.first_seq : piece.first_seq + len(piece.query_lens)]
        plan = plan_chunks(piece.query_lens, piece.seq_lens, piece.keys)
        chunks = tuple(self._chunk(spans, calls, piece.heads) for spans, calls in plan)
        return ExpandedRows(first_row + piece.first_row, sum(piece.query_lens), piece.heads, table, chunks)

    def _chunk(self, spans: Sequence[Span], calls: Sequence[tuple[bool, Segments]], heads: int) -> KeyChunk:
        counts = [count for _, count in spans]
        host = torch.tensor([0, *accumulate(counts), *(first for first, _ in spans)], dtype=torch.int32, device="cpu")
        sent = host.to(self.device, non_blocking=True)
        made = [self._dense.plan(causal, heads, self._segments(segments)) for causal, segments in calls]
        return KeyChunk(sum(counts), sent[: len(spans) + 1], sent[len(spans) + 1 :], tuple(made))

    def _segments(self, segments: Segments) -> CommonAttentionMetadata:
        rows, keys = zip(*segments, strict=True)
        return CommonAttentionMetadata.from_lengths(rows, keys, device=self.device)


def leading(
    common: CommonAttentionMetadata, count: int, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> CommonAttentionMetadata | None:
    """The first `count` sequences of a step; None where there is nothing to do."""
    if not sum(query_lens[:count]):
        return None
    starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
    return common.replace(
        query_start_loc=common.query_start_loc[: count + 1],
        seq_lens=common.seq_lens[:count],
        block_table=common.block_table[:count],
        query_start_loc_cpu=None if starts is None else starts[: count + 1],
        seq_lens_cpu=None if lens is None else lens[:count],
        num_seqs=count,
        num_tokens=sum(query_lens[:count]),
        max_query_len=max(query_lens[:count]),
        max_seq_len=max(seq_lens[:count]),
        num_decodes=min(common.num_decodes, count),
    )


def _lengths(common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
    starts = common.query_start_loc.cpu() if starts is None else starts
    lens = common.seq_lens.cpu() if lens is None else lens
    return starts.diff().tolist(), lens.tolist()
