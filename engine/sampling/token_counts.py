"""TokenCounts: how often each request's tokens occur so far, kept on the device, and the penalties by it."""

from __future__ import annotations

import numpy as np
import torch

from ..models.fused_ops import fuses
from ..transfer import transfer
from .metadata import SamplingMetadata, TokenCountUpdates
from .rows import SampledRows


class TokenCounts:
    """Counts of the tokens of requests in rows, those of a `PersistentBatch`.

    `counts[row, token]` is twice the token's occurrences in the output, plus 1 if it is in the prompt. What a
    `SamplingMetadataBuilder` does not send is counted here: the token that each row has drawn last.

    Attributes:
        counts: [num_rows + 1, vocab_size] int32; None until `reserve`, or until first a request has a penalty.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts: torch.Tensor | None = None
        self._shape, self._device = (num_rows + 1, vocab_size), device

    def penalize(
        self, logits: torch.Tensor, sampling: SamplingMetadata, rows: SampledRows, params: torch.Tensor
    ) -> torch.Tensor:
        """Count all tokens of the rows that have penalties, and apply these.

        Repetition penalty over prompt and output (arXiv 1909.05858, section 4.1), presence and frequency penalties over
        the output.

        Args:
            logits: [n, vocab_size].
            rows: theirs; the last token of one that has generated any is taken from here.
            params: [num_rows + 1, PARAMS] int32, as `PersistentBatch` has them.

        Returns:
            Scores, a new float32 tensor; the logits themselves where no row has penalties.
        """
        if not len(sampling.penalized):
            return logits
        counts = self.reserve()
        self._update(counts, sampling.counts)
        if fuses(logits):
            from .kernels import penalize

            return penalize.penalize(logits, counts, params, rows.state_rows, rows.lengths, rows.last_tokens)
        return self._by_torch(logits, rows, params, sampling.penalized)

    def reserve(self) -> torch.Tensor:
        """Room for the counts, which is 4 bytes for each token of the vocabulary in each row."""
        if self.counts is None:
            self.counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self.counts

    def _update(self, counts: torch.Tensor, updates: TokenCountUpdates) -> None:
        """In one transfer: rows to be zeroed, and tokens to be counted."""
        if not any(map(len, updates)):
            return
        zeroed, prompt_rows, prompt_tokens, output_rows, output_tokens = transfer(updates, self._device)
        vocab = self._shape[1]
        counts.index_fill_(0, zeroed.long(), 0)
        counts.view(-1).scatter_(0, prompt_rows.long() * vocab + prompt_tokens, 1)
        twos = torch.full_like(output_tokens, 2)
        counts.view(-1).scatter_add_(0, output_rows.long() * vocab + output_tokens, twos)

    def _by_torch(
        self, logits: torch.Tensor, rows: SampledRows, params: torch.Tensor, penalized: np.ndarray
    ) -> torch.Tensor:
        """As the kernel, rounding for rounding."""
        counts, vocab = self.reserve(), self._shape[1]
        (where,) = transfer([penalized], self._device)
        where = where.long()
        own = rows.state_rows[where].long()
        settings = params[own, 6:]
        drawn = (rows.lengths[where] > settings[:, 3]).int()
        counts.view(-1).scatter_add_(0, own * vocab + rows.last_tokens[where], 2 * drawn)
        repetition, presence, frequency = settings[:, :3].view(torch.float32).split(1, dim=1)
        value, some = counts[own], logits[where].float()
        some = torch.where(value > 0, torch.where(some > 0, some / repetition, some * repetition), some)
        some -= frequency * (value >> 1) + presence * (value > 1)
        return logits.float().index_copy(0, where, some)
