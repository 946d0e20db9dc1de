"""SchedulerOutput: one step's work, and the tokens sampled by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .request import Request

PLACEHOLDER_TOKEN = -1
"""A request's last token, where the device has sampled it and the host has not read it yet."""


class ScheduledRequest(NamedTuple):
    """Tokens `request.token_ids[start : start + num_tokens]` run; `start` is what was computed when scheduled.

    `samples`: whether the last row is sampled, `start + num_tokens == len(request.token_ids)`.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One batch. Decodes (one token, start > 0) come first.

    Blocks are moved before anything else runs, all layers of each: first `swap_out`, then `swap_in`, then `copies`.
    `fresh_blocks` were handed out for this step and hold what others left there, unless the runner zeroes them between
    `swap_out` and the rest. `recent_copies` and `recent_fresh` are the same of the second cache, where there is one.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_decodes: int
    copies: tuple[tuple[int, int], ...]
    """(source block, target block)."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, host block)."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, block)."""
    fresh_blocks: tuple[int, ...] = ()
    recent_copies: tuple[tuple[int, int], ...] = ()
    recent_fresh: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(item.num_tokens for item in self.scheduled)

    def align(self, tokens: Sequence[SampledToken]) -> list[SampledToken | None]:
        """Tokens of those that sample, aligned with `scheduled`: None for the others."""
        if len(tokens) == len(self.scheduled):
            return [*tokens]
        rest = iter(tokens)
        return [next(rest) if item.samples else None for item in self.scheduled]


class SampledToken(NamedTuple):
    """One sampled token. With `error` (the logits of this request were NaN) token_id is -1 and the request ends."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    error: str | None = None
