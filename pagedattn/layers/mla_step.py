"""What a step of latent attention (MLA) does: which sequences are attended to absorbed, which expanded, and in what
pieces the latter's keys are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from ..backends.base import AttentionMetadata, AttentionMetadataBuilder
from ..errors import InvalidInputError
from ..step.metadata import CommonAttentionMetadata

_Span = tuple[int, int]  # first key of a sequence, and how many
_Segments = list[tuple[int, int]]  # query rows and keys, back to back; rows without keys are left out of a call


class LatentDims(NamedTuple):
    """Sizes of a latent layer: L and R of a cached row, N and V of an expanded head beside R."""

    num_heads: int
    latent: int
    rope: int
    nope: int
    value: int

    @property
    def break_even(self) -> int:
        """New tokens of a sequence from which on its expanded form takes fewer multiplications than the absorbed one.

        For each head, key and query row the absorbed form multiplies 2 L + R times (a key of L + R, a value of L), the
        expanded one N + R + V times, after L (N + V) for each head and key. DeepSeek's sizes (512, 64, 128, 128) give
        131072 / 768 = 171. Where memory limits and not arithmetic, the absorbed form wins longer than that.
        """
        saved = 2 * self.latent + self.rope - (self.nope + self.rope + self.value)
        return -(-self.latent * (self.nope + self.value) // saved) if saved > 0 else 1 << 30

    def expanded_bytes(self, itemsize: int) -> int:
        """Bytes of a token's keys and values, and of the row that they are made from."""
        return (self.num_heads * (self.nope + self.rope + self.value) + self.latent + self.rope) * itemsize


class DenseCall(NamedTuple):
    """Attention of all expanded query rows to the keys of a chunk: causal, or to all of them."""

    causal: bool
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class KeyChunk:
    """Keys that are gathered and expanded at once: of each sequence those from `starts` on, `cu_lens` apart."""

    num_keys: int
    cu_lens: torch.Tensor  # [B' + 1] int32
    starts: torch.Tensor  # [B'] int32
    calls: tuple[DenseCall, ...]


@dataclass
class MLAMetadata(AttentionMetadata):
    """The first rows of a step are attended to absorbed, `first_row` and later ones expanded, chunk by chunk. `packed`
    is of a step without a cache: causal attention to its own keys, expanded."""

    absorbed: AttentionMetadata | None = None
    first_row: int = 0
    num_rows: int = 0  # of the expanded part
    block_table: torch.Tensor | None = None  # of its sequences
    chunks: tuple[KeyChunk, ...] = field(default=(), repr=False)
    packed: AttentionMetadata | None = None

    def describe(self) -> str:
        if self.packed is not None:
            return f"expanded, without a cache: {self.packed.describe()}"
        parts = [] if self.absorbed is None else [f"absorbed: {self.absorbed.describe()}"]
        if self.num_rows:
            keys = sum(chunk.num_keys for chunk in self.chunks)
            parts.append(f"expanded: {self.num_rows} tokens, {keys} keys in {len(self.chunks)} chunks")
        return ", ".join(parts) or "nothing to do"


class MLAMetadataBuilder(AttentionMetadataBuilder):
    """Leading sequences of at most `most_absorbed` new tokens are absorbed, the others expanded, at most `chunk_keys`
    of their keys at once. Captured steps are absorbed whole: how keys are cut into chunks depends on lengths. A step
    without block tables has no cache.

    It needs lengths on the host where there are longer sequences; where the step does not bring them, it waits for the
    device and copies them.
    """

    def __init__(
        self,
        absorbed: AttentionMetadataBuilder,
        causal: AttentionMetadataBuilder,
        full: AttentionMetadataBuilder,
        most_absorbed: int,
        chunk_keys: int,
    ) -> None:
        super().__init__(absorbed.spec, absorbed.device, absorbed.limits)
        self._absorbed, self._dense = absorbed, {True: causal, False: full}
        self._most_absorbed, self._chunk_keys = most_absorbed, chunk_keys

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if into is not None:
            if not isinstance(into, MLAMetadata) or into.absorbed is None or into.num_rows:
                raise InvalidInputError("into", "captured metadata of a latent layer", into.describe())
            self._absorbed.build(common, into.absorbed)
            return into
        if not (capture or common.block_table.shape[1]):
            return MLAMetadata(common, packed=self._dense[True].build(common))
        if capture or common.max_query_len <= self._most_absorbed:
            whole = self._absorbed.build(common, None, capture)
            return MLAMetadata(whole.common, absorbed=whole)
        query_lens, seq_lens = _lengths(common)
        split = next((i for i, n in enumerate(query_lens) if n > self._most_absorbed), len(query_lens))
        first_row = sum(query_lens[:split])
        part = leading(common, split, query_lens, seq_lens)
        absorbed = None if part is None else self._absorbed.build(part)
        rest = query_lens[split:], seq_lens[split:]
        chunks = tuple(self._chunk(*one) for one in plan_chunks(*rest, self._chunk_keys))
        return MLAMetadata(common, absorbed, first_row, sum(rest[0]), common.block_table[split:], chunks)

    def device_update(self, metadata: AttentionMetadata) -> None:
        if isinstance(metadata, MLAMetadata) and metadata.absorbed is not None:
            self._absorbed.device_update(metadata.absorbed)

    def _chunk(self, spans: Sequence[_Span], calls: Sequence[tuple[bool, _Segments]]) -> KeyChunk:
        counts = [count for _, count in spans]
        host = torch.tensor([0, *accumulate(counts), *(first for first, _ in spans)], dtype=torch.int32, device="cpu")
        sent = host.to(self.device, non_blocking=True)
        made = [DenseCall(causal, self._dense_metadata(causal, segments)) for causal, segments in calls]
        return KeyChunk(sum(counts), sent[: len(spans) + 1], sent[len(spans) + 1 :], tuple(made))

    def _dense_metadata(self, causal: bool, segments: _Segments) -> AttentionMetadata:
        rows, keys = zip(*segments, strict=True)
        return self._dense[causal].build(CommonAttentionMetadata.from_lengths(rows, keys, device=self.device))


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


def plan_chunks(
    query_lens: Sequence[int], seq_lens: Sequence[int], most: int
) -> list[tuple[list[_Span], list[tuple[bool, _Segments]]]]:
    """Chunks of at most `most` keys: what each takes of every sequence, and the attention calls over it.

    A chunk has keys that were there before the step, which every row sees, or keys of new tokens: rows of the same
    tokens see these causally, later ones all of them, in a second call.
    """
    pairs = list(zip(query_lens, seq_lens, strict=True))
    context = [(0, max(total - new, 0)) for new, total in pairs]
    fresh = [(end, total - end) for (_, end), (_, total) in zip(context, pairs, strict=True)]
    chunks: list[tuple[list[_Span], list[tuple[bool, _Segments]]]] = []
    for spans in _cut(fresh, most):
        causal: _Segments = []
        later: _Segments = []
        for (new, total), (first, count) in zip(pairs, spans, strict=True):
            # Rows of a sequence end with its last key; those before `count` keys' own see none of them.
            before = new - (total - first) if count else new
            causal += [(before, 0), (count, count), (new - before - count, 0)]
            later += [(before + count, 0), (new - before - count, count)]
        calls = [(True, _without_nothing(causal))]
        if any(rows and keys for rows, keys in later):
            calls.append((False, _without_nothing(later)))
        chunks.append((spans, calls))
    for spans in _cut(context, most):
        every = [(new, count) for (new, _), (_, count) in zip(pairs, spans, strict=True)]
        chunks.append((spans, [(False, _without_nothing(every))]))
    return chunks


def _cut(ranges: Sequence[_Span], most: int) -> list[list[_Span]]:
    """Ranges (first, count) in turn, as lists of at most `most` keys, each with one part of every range (or none)."""
    out: list[list[_Span]] = []
    room = 0
    for index, (first, count) in enumerate(ranges):
        while count > 0:
            if not room:
                out.append([(0, 0)] * len(ranges))
                room = most
            taken = min(count, room)
            out[-1][index] = (first, taken)
            first, count, room = first + taken, count - taken, room - taken
    return out


def _without_nothing(segments: _Segments) -> _Segments:
    return [one for one in segments if one != (0, 0)]


def _lengths(common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
    starts = common.query_start_loc.cpu() if starts is None else starts
    lens = common.seq_lens.cpu() if lens is None else lens
    return starts.diff().tolist(), lens.tolist()
