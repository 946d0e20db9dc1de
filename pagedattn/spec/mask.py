"""Mask: which keys a query sees. The host half; the device half of the same is `pagedattn/kernels/masking.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from ..errors import InvalidInputError

# What the kernels' own masking serves, and what the torch path does.
KERNEL_FEATURES: tuple[str, ...] = ("sliding_window",)
ALL_FEATURES = (*KERNEL_FEATURES, "mask_mod")
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of its sequence a query at position i sees, by their positions j.

    Args:
        causal: j <= i. None: as the attention type says (`AttentionSpec`).
        sliding_window: W keys, the token's own included: i - W < j, and where not causal, j < i + W too.
        mask_mod: (b, h, q_idx, kv_idx) -> bool tensor of keys to keep, beside the others; compared by identity. No
            kernel of ours compiles it, and which keys it keeps only the torch path can tell.

    Raises:
        InvalidInputError: a window below 1, or a causality that is no bool.
    """

    causal: bool | None = None
    sliding_window: int | None = None
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sliding_window, np.integer):
            object.__setattr__(self, "sliding_window", int(self.sliding_window))
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidInputError("sliding_window", "at least 1", self.sliding_window)
        if self.causal is not None and not isinstance(self.causal, bool | np.bool_):
            raise InvalidInputError("causal", "True, False or None", repr(self.causal))

    def replace(self, **changes: object) -> Mask:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def constants(self) -> tuple[int, ...]:
        """What kernels are compiled for, in the order in which `kernels/masking.py` reads them."""
        return (int(bool(self.causal)), self.sliding_window or 0)

    @classmethod
    def of(cls, constants: Sequence[int]) -> Mask:
        """The mask that has these constants, one object however often it is asked for."""
        return cls._of(tuple(constants))

    @classmethod
    @lru_cache(maxsize=256)
    def _of(cls, constants: tuple[int, ...]) -> Mask:
        causal, window = constants
        return cls(bool(causal), window or None)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what is asked for beyond causality. A kernel that serves masks of some features only says which."""
        return tuple(name for name in ALL_FEATURES if getattr(self, name) is not None)

    def unserved(self, served: tuple[str, ...]) -> tuple[str, ...]:
        """Features that are asked for and not among those served."""
        return tuple(name for name in self.features if name not in served)

    @property
    def sees_all_before(self) -> bool:
        """Whether a query sees every key before it, so that keys may be attended to apart from the query's position."""
        return not self.features

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
        return keep

    def first_key(self, position: int) -> int:
        """The first key that a query at this position, or at a later one, sees."""
        return 0 if self.sliding_window is None else max(position - self.sliding_window + 1, 0)

    def first_needed_block(self, position: int, block_size: int) -> int:
        """The first block that a query at this position, or at a later one, reads; those before may be released."""
        return self.first_key(position) // block_size

    def max_visible_keys(self, max_query_len: int, max_seq_len: int) -> int:
        """The most keys that a sequence's new tokens see together."""
        return max_seq_len if self.sliding_window is None else min(max_seq_len, self.sliding_window + max_query_len)
