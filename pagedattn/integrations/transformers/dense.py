"""A forward of a padded batch without a cache: which of its columns are tokens, and which sequences they make."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...errors import InvalidInputError
from .columns import refuse_gaps


def sequences(
    rows: int, columns: int, mask: np.ndarray | None, positions: np.ndarray | None, windowed: bool
) -> tuple[list[int], np.ndarray | None]:
    """Tokens of each sequence in turn, and which columns hold tokens, [B, S]; None: all do.

    Args:
        mask: [B, S] bool, True at tokens; None: all are.
        positions: [1 or B, S] of tokens, where a row may hold several sequences: as in transformers, another one begins
            wherever a position is not that of the token before and one more. Read only where there is no mask.
        windowed: some layer counts the distance between columns, so that gaps between tokens matter.

    Raises:
        InvalidInputError: the mask or the positions have another shape.
        UnsupportedError: padding between tokens, where that changes windows.
    """
    if mask is not None:
        if mask.shape != (rows, columns):
            raise InvalidInputError("attention_mask", f"[{rows}, {columns}], as input_ids", list(mask.shape))
        refuse_gaps(mask, windowed)
        return mask.sum(1).tolist(), None if mask.all() else mask
    if positions is None:
        return [columns] * rows, None
    if positions.shape not in ((1, columns), (rows, columns)):
        raise InvalidInputError("position_ids", f"[{rows}, {columns}], as input_ids", list(positions.shape))
    begins = np.ones((rows, columns), dtype=bool)
    begins[:, 1:] = np.diff(positions, axis=1) != 1
    return [after - at for at, after in pairwise([*np.flatnonzero(begins).tolist(), rows * columns])], None
