"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the start. `swaps` are those preemptions that were made by swap; `preemptions` counts all.

    Blocks swapped out or in are those of preempted requests, and of evicted prefixes where host memory keeps these.

    Every computed token was scheduled once more than it was recomputed, or came from the cache: when all requests have
    ended, scheduled_tokens + cached_tokens = tokens whose KV was ever needed + recomputed_tokens + dropped_tokens.
    Dropped are those of steps launched for a request before its end was known. A request whose last token was not read
    yet when it was preempted ends there: what it gave up counts as recomputed and is not computed again.
    """

    steps: int = 0
    rollbacks: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0
    dropped_tokens: int = 0
