"""What FlashMLA needs of a step: sequences of one number of new tokens, and a schedule that is of their lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ...errors import InvalidInputError, UnsupportedError
from ...spec import GraphLevel
from ...step.metadata import CommonAttentionMetadata
from ..base import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    check_capture,
    clone_for_capture,
    copy_into_captured,
)

BLOCK_SIZE = 64  # tokens of a page, all that its kernel reads
INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/FlashMLA"


@dataclass(slots=True)
class FlashMLAMetadata(AttentionMetadata):
    """Sequences as the kernel takes them, each of `tokens` new tokens: those of the step, or every token as a sequence
    of its own, which ends with the last key that the token sees.

    FlashMLA's schedule depends on the lengths, while a call that is given one compares shapes only. It is made by the
    first call after `build` or `device_update`, and by the first call that a CUDA graph records, so that a replay makes
    it again. Metadata are for one graph.
    """

    tokens: int
    seq_lens: torch.Tensor  # [n] int32
    block_table: torch.Tensor  # [n, max_blocks] int32
    captured: bool = False
    _schedule: tuple[Any, ...] | None = field(default=None, repr=False)
    _made_in_capture: bool = False

    @property
    def num_rows(self) -> int:
        """Query rows that are attended."""
        return len(self.seq_lens) * self.tokens

    def schedule(self, num_heads: int) -> tuple[Any, ...]:
        """What `flash_mla_with_kvcache` takes after the value's dimension."""
        in_capture = _is_being_captured(self.seq_lens.device)
        if self._schedule is None or self._made_in_capture != in_capture:
            # Releases before the one that makes it in the first call take these arguments, and make it here.
            self._schedule = tuple(library().get_mla_metadata(self.seq_lens, self.tokens * num_heads, 1))
            self._made_in_capture = in_capture
        return self._schedule

    def forget_schedule(self) -> None:
        """Have the next call make it again: lengths have changed."""
        self._schedule = None

    def describe(self) -> str:
        kind = f"{self.common.num_seqs} sequences of {self.tokens}"
        if len(self.seq_lens) != self.common.num_seqs or self.captured:
            kind = f"{self.common.num_seqs} sequences, each token as one of its own"
        return f"FlashMLA, {kind}"


class FlashMLABuilder(AttentionMetadataBuilder):
    """Takes a step as it is where the host knows that all its sequences have as many new tokens; of other steps, and of
    captured ones, whose lengths change, each token becomes a sequence."""

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if into is not None:
            if not isinstance(into, FlashMLAMetadata) or not into.captured:
                expected = "metadata that this builder made with capture=True"
                raise InvalidInputError("into", expected, type(into).__name__)
            copy_into_captured(into.common, common)
            self.device_update(into)
            return into
        if capture:
            check_capture(GraphLevel.ALWAYS, common)
            return self._by_token(clone_for_capture(common), captured=True)
        tokens = _tokens_of_each(common)
        if not tokens:
            return self._by_token(common)
        return FlashMLAMetadata(common, tokens, common.seq_lens.contiguous(), common.block_table)

    def device_update(self, metadata: AttentionMetadata) -> None:
        if not isinstance(metadata, FlashMLAMetadata):
            return
        metadata.forget_schedule()
        if metadata.captured:
            lens, table = sequences_of_tokens(metadata.common, bool(self.spec.causal))
            metadata.seq_lens.copy_(lens)
            metadata.block_table.copy_(table)

    def _by_token(self, common: CommonAttentionMetadata, captured: bool = False) -> FlashMLAMetadata:
        lens, table = sequences_of_tokens(common, bool(self.spec.causal))
        return FlashMLAMetadata(common, 1, lens, table, captured)


def sequences_of_tokens(common: CommonAttentionMetadata, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that each row sees [T] int32, 0 of padding rows, and the block table of its sequence [T, max_blocks].

    No value reaches the host.
    """
    starts, lens, table = common.query_start_loc, common.seq_lens, common.block_table
    row = torch.arange(common.num_tokens, dtype=torch.int32, device=starts.device)
    if not len(lens):
        return torch.zeros_like(row), table.new_zeros(len(row), table.shape[1])
    seq = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp_(max=len(lens) - 1)
    end = starts[1:][seq]
    seen = lens[seq] + row - (end - 1) if causal else lens[seq]
    return torch.where(row < end, seen.clamp_min(0), 0), table[seq]


def _tokens_of_each(common: CommonAttentionMetadata) -> int:
    """New tokens of every sequence, where the host knows that they are as many, and no more than its keys; else 0."""
    starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
    if starts is None or lens is None or not len(lens):
        # A decode may be padding, which has no new token, and a row may be, which no sequence has.
        return 0
    counts = starts.diff()
    tokens = int(counts[0])
    return tokens if bool((counts == tokens).all()) and bool((lens >= tokens).all()) else 0


def _is_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def library() -> ModuleType:
    """The module with FlashMLA's calls.

    Raises:
        UnsupportedError: it is not installed, or does not load; a build for another torch or CUDA shows only then.
    """
    try:
        return import_module("flash_mla")
    except ImportError as error:
        raise UnsupportedError(f"FlashMLA (flash_mla) cannot be loaded: {error}; {INSTALL}") from error
