"""Detokenizer: text of a growing sequence, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.errors import UnsupportedError

from .folder import ModelFolder
from .tokenizer import Tokenizer

_MAX_HELD = 32
_UNDECODED = "\ufffd"


class Detokenizer:
    """Text of one request's output. The pieces together are the text of all its tokens.

    A token may hold part of a character, so text ending in U+FFFD is held back until more tokens decide it, 32 at most:
    then it is given out as it decodes. Each call decodes the tokens since the last sure boundary and the piece before
    it, which a decoder needs for its spaces; so a boundary is behind tokens that have text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is complete
        self._sent = 0  # characters of the window's text that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they completed."""
        self._window += token_ids
        text = self._decode()
        sure = text.rstrip(_UNDECODED)
        empty = len(text) <= self._sent
        if (empty or len(sure) < len(text)) and len(self._window) - self._known <= _MAX_HELD:
            return self._send(sure)
        if empty:
            del self._window[self._known :]
            return ""
        piece = self._send(text)
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._sent = len(self._decode())
        return piece

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        return self._send(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _send(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece


def detokenizer_of(tokenizer: Tokenizer | None, folder: ModelFolder) -> Detokenizer:
    """A detokenizer for one request; UnsupportedError for a folder without a tokenizer."""
    if tokenizer is None:
        raise UnsupportedError(f"{folder.root / 'tokenizer.json'} is missing; use token ids")
    return Detokenizer(tokenizer)
