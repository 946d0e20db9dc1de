"""KVGroup and SwapConfig: what a scheduler knows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedattn import Mask


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the tokens a block holds, and the window (None: every token is kept).

    `recent_blocks` is given of blocks that are not encoded yet, in the second cache of a format that encodes whole
    blocks: so many, the null block included, which are a pool of their own. A sequence needs the one of its next token
    on, `window_blocks` before that, and its `first_blocks`. Such a group stands behind those of layers, of which there
    is one, with the same numbers: as many full blocks as a window has are not encoded yet.
    """

    block_size: int
    sliding_window: int | None = None
    recent_blocks: int | None = None
    window_blocks: int = 0
    first_blocks: int = 0
    _mask: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: the scheduler asks it for every request of every step.
        mask = Mask(sliding_window=self.sliding_window)
        if self.recent_blocks is not None:
            mask = mask.replace(own_block=self.block_size, recent_blocks=self.window_blocks or None)
        object.__setattr__(self, "_mask", mask)

    @property
    def full_recent_blocks(self) -> int:
        """Full blocks that a sequence holds in the second cache."""
        return self.window_blocks + self.first_blocks

    def num_kept_blocks(self, first: int) -> int:
        """How many blocks at a sequence's beginning are read here although `first_needed_block` is `first`."""
        return 0 if self.recent_blocks is None else min(self.first_blocks, first)

    @property
    def window(self) -> int | None:
        """Tokens that the first token of a block reads here, itself included; None is all."""
        return self.sliding_window if self.recent_blocks is None else 1 + self.window_blocks * self.block_size

    def num_stored_blocks(self, num_tokens: int) -> int:
        """How many blocks of `num_tokens` computed ones hold for good what others may read in them."""
        full = num_tokens // self.block_size
        return full if self.recent_blocks is not None else max(0, full - self.window_blocks)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, reads."""
        return self._mask.first_needed_block(num_computed_tokens, self.block_size)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a time."""
        need, window = -(-num_tokens // self.block_size), self.sliding_window
        return need if window is None else min(need, -(-(window - 1 + chunk) // self.block_size) + 1)


def groups_of_layers(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """Without the group of blocks that are not encoded."""
    return tuple(group for group in groups if group.recent_blocks is None)


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """Host memory for blocks: those of preempted requests, and with `keeps_prefixes` evicted ones of the prefix cache.

    `tokens_per_block` is how many tokens can be computed in the time that one block takes there and back.
    """

    num_blocks: int = 0
    tokens_per_block: float = 0.0
    keeps_prefixes: bool = False
