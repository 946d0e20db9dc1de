"""Which columns of a padded batch hold tokens. Padding is not stored, so that a row's tokens are counted here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import InvalidInputError, UnsupportedError


class Columns:
    """The columns that a cache has seen, as transformers counts them: padding included.

    Attributes:
        count: columns so far, those of a forward that runs included.
        done: columns before that forward, which is what transformers takes for the length of the cache.
        running: whether a forward is under way, or failed.
        known: [B, m] bool; columns from m on hold tokens in every row.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.count, self.done, self.known, self._padded = 0, 0, np.ones((0, 0), dtype=bool), False
        self.running = False

    def become(self, other: Columns) -> None:
        """The same as `other`, from now on apart from it."""
        self.count, self.done, self.known, self._padded = other.count, other.done, other.known, other._padded
        self.running = other.running

    def admit(
        self, mask: np.ndarray | None, rows: int, new: int, windowed: bool, unread: bool = False
    ) -> np.ndarray | None:
        """Take `new` columns in.

        Args:
            mask: [B, columns so far + new] of what transformers got for `attention_mask`; None: everything is a token.
            windowed: some layer counts the distance between columns, so that gaps between tokens matter.
            unread: there is a mask, which can only say that all new columns are tokens.

        Returns:
            Which of the new columns hold tokens, [B, new]; None: all do.

        Raises:
            InvalidInputError: the mask has another shape, or is not what it was for columns that are in the cache.
            UnsupportedError: padding after a row's tokens, or between them where that changes windows.
        """
        if mask is None:
            if self._padded and not unread:
                raise InvalidInputError(
                    "attention_mask", f"given for all {self.count + new} columns", None, "the cache saw padding before"
                )
            self.count += new
            return None
        if mask.shape != (rows, self.count + new):
            raise InvalidInputError(
                "attention_mask",
                f"[{rows}, {self.count + new}]: the {self.count} columns in the cache and the new ones",
                list(mask.shape),
            )
        differs = np.argwhere(mask[:, : self.count] != self._all(rows))
        if len(differs):
            row, column = differs[0].tolist()
            expected = "as before for the columns in the cache"
            raise InvalidInputError("attention_mask", expected, f"another value at row {row}, column {column}")
        if new:
            _refuse_ends(mask)
        refuse_gaps(mask, windowed)
        self.known, self.count, self._padded = mask, self.count + new, not mask.all()
        part = mask[:, self.count - new :]
        return None if part.all() else part

    def lengths(self, columns: int, rows: int) -> list[int]:
        """Tokens of each row in the first `columns` columns."""
        seen = self.known[:, :columns]
        if not seen.size:
            return [columns] * rows
        return (seen.sum(1) + max(0, columns - seen.shape[1])).tolist()

    def cut(self, columns: int) -> None:
        """Keep the first `columns`."""
        self.count, self.done, self.running = columns, columns, False
        self.known = self.known[:, :columns]
        self._padded = not self.known.all()

    def take(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        if self.known.size:
            self.known = self.known[list(rows)]
            self._padded = not self.known.all()

    def _all(self, rows: int) -> np.ndarray:
        seen = self.known if self.known.size else np.ones((rows, 0), dtype=bool)
        return np.concatenate((seen, np.ones((rows, self.count - seen.shape[1]), dtype=bool)), 1)


def refuse_gaps(mask: np.ndarray, windowed: bool) -> None:
    """Raise UnsupportedError where padding between tokens of a row changes what a window holds."""
    begun, goes_on = np.maximum.accumulate(mask, 1), np.maximum.accumulate(mask[:, ::-1], 1)[:, ::-1]
    gap = begun & goes_on & ~mask
    if windowed and gap.any():
        row = int(gap.any(1).argmax())
        raise UnsupportedError(
            f"row {row} of the attention_mask has padding between tokens, which sliding windows of transformers count "
            "and a paged cache does not store; start a new cache and pad whole conversations on the left"
        )


def _refuse_ends(mask: np.ndarray) -> None:
    ends = mask.any(1) & ~mask[:, -1]
    if ends.any():
        row = int(ends.argmax())
        raise UnsupportedError(
            f"row {row} of the attention_mask ends in padding, after which nothing can follow in a paged cache, which "
            'stores none: pad on the left (tokenizer.padding_side = "left"), or use_cache=False where no tokens follow'
        )
