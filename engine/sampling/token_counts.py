"""TokenCounts: how often each request's tokens occur so far, kept on the device, and the penalties by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedattn.errors import PagedAttnError

from ..models.fused_ops import fuses
from ..request import Request
from ..transfer import transfer
from .packed_params import has_penalty
from .rows import SampledRows


class TokenCounts:
    """Counts of the tokens of requests in rows, those of a `PersistentBatch`.

    `counts[row, token]` is twice the token's occurrences in the output, plus 1 if it is in the prompt. A row's counts
    grow with its request: from one sampled token to the next the host sends nothing, since the token that was drawn is
    on the device. A row is zeroed, and sent anew, where it passes to another request or a step is run again.

    Attributes:
        counts: [num_rows + 1, vocab_size] int32; None until `reserve`, or until first a request has a penalty.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts: torch.Tensor | None = None
        self._shape, self._device = (num_rows + 1, vocab_size), device
        # On the host: of a row's owner, whether it has penalties, its prompt, and how many of its tokens are counted.
        self._penalized = np.zeros(num_rows + 1, dtype=bool)
        self._prompt_lens, self._counted = (np.zeros(num_rows + 1, dtype=np.int32) for _ in range(2))
        self.forget()

    def forget(self) -> None:
        """Give up all rows: after a failed step it is not known what is counted."""
        self._owners: list[Request | None] = [None] * self._shape[0]

    def penalize(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: SampledRows, params: torch.Tensor
    ) -> torch.Tensor:
        """Count all tokens of the requests that have penalties, and apply these.

        Repetition penalty over prompt and output (arXiv 1909.05858, section 4.1), presence and frequency penalties over
        the output.

        Args:
            logits: [n, vocab_size], row i of `requests[i]`.
            rows: of the requests; the last token of one that has generated any is taken from here.
            params: [num_rows + 1, PARAMS] int32, as `PersistentBatch` has them.

        Returns:
            Scores, a new float32 tensor; the logits themselves where no request has penalties.
        """
        row_indices = rows.row_indices
        owned = zip(row_indices.tolist(), requests, strict=True)
        fresh = np.array([self._owners[row] is not request for row, request in owned], dtype=bool)
        penalized = self._penalized[row_indices]
        penalized[fresh] = [has_penalty(requests[at].sampling) for at in np.flatnonzero(fresh)]
        if not penalized.any():
            return logits
        counts = self.reserve()
        self._update(requests, row_indices, fresh, penalized)
        if fuses(logits):
            from .kernels import penalize

            return penalize.penalize(logits, counts, params, rows.state_rows, rows.lengths, rows.last_tokens)
        return self._by_torch(logits, rows, params, penalized)

    def reserve(self) -> torch.Tensor:
        """Room for the counts, which is 4 bytes for each token of the vocabulary in each row."""
        if self.counts is None:
            self.counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self.counts

    def _update(
        self, requests: Sequence[Request], row_indices: np.ndarray, fresh: np.ndarray, penalized: np.ndarray
    ) -> None:
        """Send what the device does not know: tokens before the last one that was drawn."""
        for at in np.flatnonzero(fresh):
            row = row_indices[at]
            self._owners[row], self._prompt_lens[row] = requests[at], requests[at].prompt_len
        self._penalized[row_indices] = penalized
        lengths = np.array([len(request.token_ids) for request in requests], dtype=np.int32)
        # The last token of an output may be PLACEHOLDER_TOKEN to the host; a prompt's is not drawn.
        known = lengths - (lengths > self._prompt_lens[row_indices])
        counted = self._counted[row_indices]
        zeroed = penalized & (fresh | (counted > known))
        counted[zeroed] = 0
        self._counted[row_indices] = lengths
        behind = np.flatnonzero(penalized & (counted < known))
        if len(behind) or zeroed.any():
            spans = zip(*(values[behind].tolist() for values in (row_indices, counted, known)), strict=True)
            pieces = [_Piece(requests[at], *span) for at, span in zip(behind, spans, strict=True)]
            self._send(row_indices[zeroed], pieces)

    def _send(self, zeroed: np.ndarray, pieces: Sequence[_Piece]) -> None:
        """In one transfer: rows to be zeroed, and tokens to be counted."""
        prompts = _joined([piece._replace(end=min(piece.end, piece.request.prompt_len)) for piece in pieces])
        outputs = _joined([piece._replace(first=max(piece.first, piece.request.prompt_len)) for piece in pieces])
        if (outputs[1] < 0).any():
            raise PagedAttnError("a token before the last one is not known yet: please report it")
        sent = transfer((zeroed, *prompts, *outputs), self._device)
        zero_rows, prompt_rows, prompt_tokens, output_rows, output_tokens = sent
        counts, vocab = self.reserve(), self._shape[1]
        counts.index_fill_(0, zero_rows.long(), 0)
        counts.view(-1).scatter_(0, prompt_rows.long() * vocab + prompt_tokens, 1)
        twos = torch.full_like(output_tokens, 2)
        counts.view(-1).scatter_add_(0, output_rows.long() * vocab + output_tokens, twos)

    def _by_torch(
        self, logits: torch.Tensor, rows: SampledRows, params: torch.Tensor, penalized: np.ndarray
    ) -> torch.Tensor:
        """As the kernel, rounding for rounding."""
        counts, vocab = self.reserve(), self._shape[1]
        (where,) = transfer([np.flatnonzero(penalized)], self._device)
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


class _Piece(NamedTuple):
    """Tokens of a request, to be counted in its row."""

    request: Request
    row: int
    first: int
    end: int


def _joined(pieces: Sequence[_Piece]) -> tuple[np.ndarray, np.ndarray]:
    """The row of each token, and the tokens; both [t] int32."""
    tokens = [np.array(request.token_ids[first:end], dtype=np.int32) for request, _, first, end in pieces]
    rows = np.array([piece.row for piece in pieces], dtype=np.int32)
    return rows.repeat([len(ids) for ids in tokens]), np.concatenate([*tokens, np.zeros(0, dtype=np.int32)])
