"""SamplingMetadata: what the sampled rows of a step need beyond one pass over their logits, as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedattn.errors import PagedAttnError

from ..request import Request
from ..sampling_params import SamplingParams

NO_LOGPROBS = -1
_NONE = np.zeros(0, dtype=np.int32)


class TokenCountUpdates(NamedTuple):
    """Rows of `TokenCounts` to be zeroed, then tokens to be counted in rows; each [k] int32."""

    zeroed: np.ndarray = _NONE
    prompt_rows: np.ndarray = _NONE
    prompt_tokens: np.ndarray = _NONE
    output_rows: np.ndarray = _NONE
    output_tokens: np.ndarray = _NONE


class SamplingMetadata(NamedTuple):
    """Of n sampled rows; all int32."""

    logprobs: np.ndarray  # [n], how many of the best tokens each reports, NO_LOGPROBS: not even its own
    masked: np.ndarray  # [k, 2], one of the n, and a token that it may not have yet
    penalized: np.ndarray  # [m], those of the n that have penalties
    counts: TokenCountUpdates


def has_penalty(sampling: SamplingParams) -> bool:
    """Whether logits depend on the tokens so far."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


def needs_processing(sampling: SamplingParams) -> bool:
    """Whether a row of it needs more than one pass over its logits."""
    return has_penalty(sampling) or sampling.min_tokens > 0 or sampling.logprobs is not None


class SamplingMetadataBuilder:
    """Knows what is counted of each row of `TokenCounts`, so that a step sends what is new.

    A row's counts grow with its request: from one sampled token to the next the host sends nothing, since the token
    that was drawn is on the device. A row is zeroed, and sent anew, where it passes to another request or a step is run
    again.
    """

    def __init__(self, num_rows: int) -> None:
        # Of a row's owner: whether it has penalties, its prompt, and how many of its tokens are counted.
        self._penalized = np.zeros(num_rows + 1, dtype=bool)
        self._prompt_lens, self._counted = (np.zeros(num_rows + 1, dtype=np.int32) for _ in range(2))
        self.forget()

    def forget(self) -> None:
        """Give up all rows: after a failed step it is not known what is counted."""
        self._owners: list[Request | None] = [None] * len(self._counted)

    def build(self, requests: Sequence[Request], rows: np.ndarray) -> SamplingMetadata:
        """Of the sampled requests of a step, in rows [n] int32.

        Raises:
            PagedAttnError: a token before the last one of a request with penalties is not known to the host.
        """
        logprobs = [NO_LOGPROBS if (k := request.sampling.logprobs) is None else k for request in requests]
        masked = [
            (row, token)
            for row, request in enumerate(requests)
            if request.num_generated < request.sampling.min_tokens
            for token in request.stop_ids
        ]
        return SamplingMetadata(
            np.array(logprobs, dtype=np.int32), np.array(masked, dtype=np.int32).reshape(-1, 2),
            *self._penalties(requests, rows),
        )  # fmt: skip

    def _penalties(self, requests: Sequence[Request], rows: np.ndarray) -> tuple[np.ndarray, TokenCountUpdates]:
        """Those with penalties, and of these what the device does not know: tokens before the last one drawn."""
        owned = zip(rows.tolist(), requests, strict=True)
        fresh = np.array([self._owners[row] is not request for row, request in owned], dtype=bool)
        penalized = self._penalized[rows]
        penalized[fresh] = [has_penalty(requests[at].sampling) for at in np.flatnonzero(fresh)]
        if not penalized.any():
            return _NONE, TokenCountUpdates()
        for at in np.flatnonzero(fresh):
            row = rows[at]
            self._owners[row], self._prompt_lens[row] = requests[at], requests[at].prompt_len
        self._penalized[rows] = penalized
        lengths = np.array([len(request.token_ids) for request in requests], dtype=np.int32)
        # The last token of an output may be PLACEHOLDER_TOKEN to the host; a prompt's is not drawn.
        known = lengths - (lengths > self._prompt_lens[rows])
        counted = self._counted[rows]
        zeroed = penalized & (fresh | (counted > known))
        counted[zeroed] = 0
        self._counted[rows] = lengths
        behind = np.flatnonzero(penalized & (counted < known))
        spans = zip(*(values[behind].tolist() for values in (rows, counted, known)), strict=True)
        pieces = [_Piece(requests[at], *span) for at, span in zip(behind, spans, strict=True)]
        return np.flatnonzero(penalized).astype(np.int32), _updates(rows[zeroed], pieces)


class _Piece(NamedTuple):
    """Tokens of a request, to be counted in its row."""

    request: Request
    row: int
    first: int
    end: int


def _updates(zeroed: np.ndarray, pieces: Sequence[_Piece]) -> TokenCountUpdates:
    prompts = _joined([piece._replace(end=min(piece.end, piece.request.prompt_len)) for piece in pieces])
    outputs = _joined([piece._replace(first=max(piece.first, piece.request.prompt_len)) for piece in pieces])
    if (outputs[1] < 0).any():
        raise PagedAttnError("a token before the last one is not known yet: please report it")
    return TokenCountUpdates(zeroed, *prompts, *outputs)


def _joined(pieces: Sequence[_Piece]) -> tuple[np.ndarray, np.ndarray]:
    """The row of each token, and the tokens; both [t] int32."""
    tokens = [np.array(request.token_ids[first:end], dtype=np.int32) for request, _, first, end in pieces]
    rows = np.array([piece.row for piece in pieces], dtype=np.int32)
    return rows.repeat([len(ids) for ids in tokens]), np.concatenate([*tokens, _NONE])
