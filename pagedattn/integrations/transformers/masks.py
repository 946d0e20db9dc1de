"""Which mask a transformers model builds for a layer, told from the mask function that it hands to its attention.

transformers keeps what a layer may attend to (window, chunk, bidirectional parts) in mask functions; an attention
function of one's own never sees them. While a model is probed, `describe_mask` stands in for the code that would turn
such a function into a tensor, and so learns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UnsupportedError

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MOST_POSITIONS = 1 << 20
_ROWS = 16


@dataclass(frozen=True, slots=True)
class CausalMask:
    """Causal over `positions`, and within a window of `window` tokens, the token's own included; None: no window."""

    window: int | None
    positions: int

    def agrees_with(self, window: int | None) -> bool:
        """Whether a window (None: none) means the same over these positions."""
        return self.window == (None if window is not None and window >= self.positions else window)


class MaskNote(torch.Tensor):
    """What a probed model gets for a mask: an empty tensor that says which mask it stands for."""

    mask: CausalMask


def describe_mask(
    *_args: Any, mask_function: MaskFunction, config: Any, positions: int | None = None, **_options: Any
) -> MaskNote:
    """A mask interface of transformers: describes the mask instead of building it.

    Args:
        positions: their number; None: all that the model has.

    Raises:
        UnsupportedError: it is no causal mask with or without a window.
    """
    limit, window = (getattr(config, of, None) for of in ("max_position_embeddings", "sliding_window"))
    wide = min(max(limit or 4096, (window or 0) + 1), _MOST_POSITIONS)  # a window shows in more than it has
    mask = classify(mask_function, wide if positions is None else positions)
    if mask is None:
        raise UnsupportedError(
            f"{config.model_type} has a mask that is neither causal nor a causal sliding window (chunks, a prefix or "
            "parts that attend both ways), which a paged cache does not express; run the model with transformers"
        )
    note = torch.empty(0).as_subclass(MaskNote)
    note.mask = mask
    return note


def classify(mask_function: MaskFunction, positions: int) -> CausalMask | None:
    """The mask over `positions` positions: its last row says the window, other rows must agree; None: another mask."""
    keys = torch.arange(positions)
    try:
        last = _row(mask_function, positions - 1, keys)
        window = int(last.sum())
        for query in {positions - 1 - positions * i // _ROWS for i in range(_ROWS)} | {0, window - 1, window}:
            distance = query - keys
            if 0 <= query < positions:
                expected = (distance >= 0) & (distance < window)
                if not torch.equal(_row(mask_function, query, keys), expected):
                    return None
    except (IndexError, RuntimeError):  # it looks things up by token, so that it depends on more than positions
        return None
    return CausalMask(None if window == positions else window, positions)


def _row(mask_function: MaskFunction, query: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(1, dtype=torch.long)
    allowed = mask_function(zero, zero, torch.tensor([query]), keys)
    return torch.as_tensor(allowed, dtype=torch.bool).expand(len(keys)).cpu()
