"""Mask: which keys a query sees. The host half; the device half of the same is `pagedattn/kernels/masking.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from ..errors import InvalidInputError

# What the kernels' own masking serves, and what the torch path does.
KERNEL_FEATURES: tuple[str, ...] = (
    *("sliding_window", "own_block", "earlier_blocks", "recent_blocks"),
    *("from_block", "to_block"),
)
ALL_FEATURES = (*KERNEL_FEATURES, "mask_mod")
_Positions = TypeVar("_Positions", int, torch.Tensor)
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of its sequence a query at position i sees, by their positions j.

    Args:
        causal: j <= i. None: as the attention type says (`AttentionSpec`).
        sliding_window: W keys, the token's own included: i - W < j, and where not causal, j < i + W too.
        mask_mod: (b, h, q_idx, kv_idx) -> bool tensor of keys to keep, beside the others; compared by identity. No
            kernel of ours compiles it, and which keys it keeps only the torch path can tell.
        own_block: only keys of the query's own block of so many tokens: j // S == i // S.
        earlier_blocks: only keys of blocks of so many tokens before the query's own: j // S < i // S. These two are the
            halves of attention over a cache whose open blocks lie in a group of their own (`docs/formats.md`).
        recent_blocks: with either of them: so many blocks before the query's own count as its own.
        from_block, to_block: with earlier_blocks: only keys of blocks from this index on, or before this index. The
            first blocks of a sequence can then be read elsewhere, where they are not encoded.

    Raises:
        InvalidInputError: a window or a block below 1, recent blocks without either of the two, a first or last block
            without earlier_blocks, or a causality that is no bool.
    """

    causal: bool | None = None
    sliding_window: int | None = None
    mask_mod: MaskMod | None = None
    own_block: int | None = None
    earlier_blocks: int | None = None
    recent_blocks: int | None = None
    from_block: int | None = None
    to_block: int | None = None

    def __post_init__(self) -> None:
        for name in KERNEL_FEATURES:
            length = getattr(self, name)
            if isinstance(length, np.integer):
                object.__setattr__(self, name, int(length))
            if length is not None and length < 1:
                raise InvalidInputError(name, "at least 1", length)
        if self.recent_blocks is not None and self.own_block is None and self.earlier_blocks is None:
            remedy = "pass own_block or earlier_blocks with it"
            raise InvalidInputError("recent_blocks", "None without a block size", self.recent_blocks, remedy)
        for name in ("from_block", "to_block"):
            if getattr(self, name) is not None and self.earlier_blocks is None:
                remedy = "pass earlier_blocks with it"
                raise InvalidInputError(name, "None without a block size", getattr(self, name), remedy)
        if self.causal is not None and not isinstance(self.causal, bool | np.bool_):
            raise InvalidInputError("causal", "True, False or None", repr(self.causal))

    def replace(self, **changes: object) -> Mask:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def constants(self) -> tuple[int, ...]:
        """What kernels are compiled for, in the order in which `kernels/masking.py` reads them: causality, the window,
        then what else there is up to the last one that is given."""
        lengths = [getattr(self, name) or 0 for name in KERNEL_FEATURES]
        count = max([1, *(at + 1 for at, length in enumerate(lengths) if length)])
        return (int(bool(self.causal)), *lengths[:count])

    @classmethod
    def of(cls, constants: Sequence[int]) -> Mask:
        """The mask that has these constants, one object however often it is asked for."""
        return cls._of(tuple(constants))

    @classmethod
    @lru_cache(maxsize=256)
    def _of(cls, constants: tuple[int, ...]) -> Mask:
        causal, *lengths = constants
        return cls(bool(causal)).replace(**{name: n or None for name, n in zip(KERNEL_FEATURES, lengths, strict=False)})

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what is asked for beyond causality. A kernel that serves masks of some features only says which."""
        return tuple(name for name in ALL_FEATURES if getattr(self, name) is not None)

    def unserved(self, served: tuple[str, ...]) -> tuple[str, ...]:
        """Features that are asked for and not among those served."""
        return tuple(name for name in self.features if name not in served)

    @property
    def sees_all_before(self) -> bool:
        """Whether a query sees every key before it."""
        return not self.features

    @property
    def sees_first_keys(self) -> bool:
        """Whether a query sees every key before an end that follows from its position (`first_keys_seen`), so that keys
        before all queries' ends may be attended to apart from their positions."""
        return not self.unserved(("earlier_blocks", "recent_blocks"))

    def first_keys_seen(self, position: int) -> int:
        """How many of its first keys a query at this position sees, where it `sees_first_keys`, as each later one does
        too."""
        if self.earlier_blocks is None:
            return position + 1
        return max(position // self.earlier_blocks - (self.recent_blocks or 0), 0) * self.earlier_blocks

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions see keys at those, by broadcasting; `mask_mod` aside."""
        distance = key - query
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            keep = keep & (distance <= 0)
        if self.sliding_window is not None:
            keep = keep & (distance > -self.sliding_window)
            if not self.causal:
                keep = keep & (distance < self.sliding_window)
        if self.own_block is not None:
            keep = keep & (key // self.own_block <= query // self.own_block)
            keep = keep & (key >= self._first_recent(query, self.own_block))
        if self.earlier_blocks is not None:
            keep = keep & (key < self._first_recent(query, self.earlier_blocks))
            if self.from_block is not None:
                keep = keep & (key >= self.from_block * self.earlier_blocks)
            if self.to_block is not None:
                keep = keep & (key < self.to_block * self.earlier_blocks)
        return keep

    def _first_recent(self, position: _Positions, size: int) -> _Positions:
        """The first key of the query's own block, or of the first that counts as it; may be negative."""
        return (position // size - (self.recent_blocks or 0)) * size

    def first_key(self, position: int) -> int:
        """The first key that a query at this position, or at a later one, sees."""
        low = 0 if self.sliding_window is None else max(position - self.sliding_window + 1, 0)
        if self.earlier_blocks is not None:
            low = max(low, (self.from_block or 0) * self.earlier_blocks)
        if self.own_block is None:
            return low
        return max(low, self._first_recent(position, self.own_block))

    def first_needed_block(self, position: int, block_size: int) -> int:
        """The first block that a query at this position, or at a later one, reads; those before may be released."""
        return self.first_key(position) // block_size

    def max_visible_keys(self, max_query_len: int, max_seq_len: int) -> int:
        """The most keys that a sequence's new tokens see together."""
        blocks = None if self.own_block is None else self.own_block * (1 + (self.recent_blocks or 0))
        lengths = [one for one in (self.sliding_window, blocks) if one is not None]
        most = min(max_seq_len, min(lengths) + max(max_query_len, 1) - 1) if lengths else max_seq_len
        if self.earlier_blocks is None or self.to_block is None:
            return most
        return min(most, self.to_block * self.earlier_blocks)
