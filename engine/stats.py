"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the start. `swaps` are those preemptions that were made by swap; `preemptions` counts all.

    Every computed token was scheduled once more than it was recomputed, or came from the cache: when all requests have
    ended, scheduled_tokens + cached_tokens = tokens whose KV was ever needed + recomputed_tokens.
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at an engine: its queues, its blocks (the null block aside) and its counters."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    counters: Counters

    @property
    def cache_use(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of admitted requests that the prefix cache had, 0 to 1."""
        return self.counters.cached_tokens / max(1, self.counters.queried_tokens)
