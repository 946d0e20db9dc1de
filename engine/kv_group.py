"""KVGroup and SwapConfig: what a scheduler knows of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedattn import Mask


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the tokens a block holds, and the window (None: every token is kept)."""

    block_size: int
    sliding_window: int | None = None
    _mask: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: the scheduler asks it for every request of every step.
        object.__setattr__(self, "_mask", Mask(sliding_window=self.sliding_window))

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, reads."""
        return self._mask.first_needed_block(num_computed_tokens, self.block_size)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a time."""
        need, window = -(-num_tokens // self.block_size), self.sliding_window
        return need if window is None else min(need, -(-(window - 1 + chunk) // self.block_size) + 1)


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """Host memory for blocks: those of preempted requests, and with `keeps_prefixes` evicted ones of the prefix cache.

    `tokens_per_block` is how many tokens can be computed in the time that one block takes there and back.
    """

    num_blocks: int = 0
    tokens_per_block: float = 0.0
    keeps_prefixes: bool = False
