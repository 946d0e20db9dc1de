"""Prompts as users give them, checked and turned into token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pagedattn.errors import RequestError

from ..runner_protocol import Tokenizer

Prompt: TypeAlias = "str | Sequence[int]"

_MOST_CHARACTERS = 128  # of a token; vocabularies have some of as many blanks


def is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a sequence of prompts; a string or a sequence of ids is one prompt, an empty one is no prompt."""
    if isinstance(prompts, str) or not _is_sequence(prompts):
        return False
    return len(prompts) == 0 or _is_sequence(prompts[0])


def encode_prompt(
    prompt: Prompt, *, tokenizer: Tokenizer | None, vocab_size: int, max_tokens: int
) -> tuple[str | None, array[int]]:
    """A prompt's text, if it was given as text, and its token ids.

    Raises:
        RequestError: empty, longer than `max_tokens`, ids that are no integers or not below `vocab_size`, or text where
            there is no tokenizer.
    """
    text = prompt if isinstance(prompt, str) else None
    ids: Sequence[int] = _encode_text(prompt, tokenizer, max_tokens) if isinstance(prompt, str) else prompt
    if text is None and not _is_sequence(ids):
        raise RequestError(f"prompt must be text or a sequence of token ids, got {type(prompt).__name__}")
    if not 1 <= len(ids) <= max_tokens:
        raise RequestError(
            f"prompt must have 1 to {max_tokens} tokens (max_model_len less one), got {len(ids)}; "
            + ("shorten it or raise max_model_len" if len(ids) else "give it at least one token")
        )
    tokens = _to_array(ids)
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}")
    return text, tokens


def refuse_placeholders(token_ids: Sequence[int], placeholders: Mapping[int, str]) -> None:
    """Raise RequestError for a prompt with one of the ids that stand for other inputs, which `placeholders` names."""
    if not placeholders or placeholders.keys().isdisjoint(token_ids):
        return
    index, token = next((index, token) for index, token in enumerate(token_ids) if token in placeholders)
    raise RequestError(
        f"prompt must be text alone, since the engine runs this model as a text model; got token {token} at index "
        f"{index}, which stands for {placeholders[token]}; leave it out"
    )


def _is_sequence(value: object) -> bool:
    """Text, a list, tuple, array or the like, or a NumPy array or tensor with a dimension."""
    return not isinstance(value, bytes | bytearray) and (isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0)


def _encode_text(text: str, tokenizer: Tokenizer | None, max_tokens: int) -> Sequence[int]:
    if tokenizer is None:
        raise RequestError("prompt must be token ids, because the model folder has no tokenizer; got text")
    if len(text) > max_tokens * _MOST_CHARACTERS:
        raise RequestError(
            f"prompt must have at most {max_tokens * _MOST_CHARACTERS} characters for {max_tokens} tokens, "
            f"got {len(text)}; shorten it or raise max_model_len"
        )
    return tokenizer.encode(text)


def _to_array(ids: Sequence[int]) -> array[int]:
    """Ids as int32. NumPy and tensor integers count as integers; bools and floats do not."""
    to_list = getattr(ids, "tolist", None)
    values = to_list() if to_list is not None else ids
    kinds = set(map(type, values))
    wrong = next((kind for kind in kinds if kind is bool or not hasattr(kind, "__index__")), None)
    if wrong is not None:
        raise RequestError(f"token ids must be integers, got {wrong.__name__}")
    try:
        return array("i", values)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"token ids must be integers of 32 bits: {error}") from None
