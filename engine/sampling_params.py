"""How one request is sampled, and when it stops. Checked once, when it is made."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from pagedattn.errors import RequestError

MAX_TOKENS = 1 << 24
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20
MAX_N = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. The defaults sample from the whole distribution and stop at 16 tokens.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; -1 keeps all.
        top_p: keep the smallest set of tokens with this probability, in (0, 1].
        min_p: keep tokens at least this likely relative to the likeliest, in [0, 1].
        seed: int64; with it the tokens depend on the seed and the position only. None: the engine draws one.
        max_tokens: tokens to generate at most; None is as many as the model's length allows.
        min_tokens: no stop token, eos or stop string ends the request before this many tokens.
        stop: strings that end the request; the text is cut before them.
        stop_token_ids: tokens that end the request, beside the model's eos tokens.
        ignore_eos: the model's eos tokens do not end the request.
        logprobs: report the log probability of each token and of this many best ones; None reports none.
        repetition_penalty: divides (or multiplies) logits of tokens seen in prompt or output; 1 is off.
        presence_penalty: subtracted once from logits of generated tokens; in [-2, 2].
        frequency_penalty: subtracted for each time a token was generated; in [-2, 2].
        n: how many completions of the prompt to generate.

    Raises:
        RequestError: a value of the wrong type or outside its limits.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name, low, high in _FLOAT_LIMITS:
            set_field(self, name, _checked_float(name, getattr(self, name), low, high))
        for name, low, high, optional in _INT_LIMITS:
            value = getattr(self, name)
            if value is not None or not optional:
                set_field(self, name, checked_int(name, value, low, high))
        if self.top_p == 0:
            raise RequestError("top_p must be in (0, 1], got 0; use temperature=0 for greedy sampling")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0, got 0; 1 turns it off")
        if self.top_k == 0:
            set_field(self, "top_k", -1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be a bool, got {_show(self.ignore_eos)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        set_field(self, "stop", _checked_stop(self.stop))
        set_field(self, "stop_token_ids", _checked_stop_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


_FLOAT_LIMITS = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_INT_LIMITS = (
    ("top_k", -1, 2**31 - 1, False),
    ("seed", -(2**63), 2**63 - 1, True),
    ("max_tokens", 1, MAX_TOKENS, True),
    ("min_tokens", 0, MAX_TOKENS, False),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("n", 1, MAX_N, False),
)


def checked_int(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int (NumPy integers included, bools and floats not) within [low, high], else RequestError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {_show(value)}")
    return number


def _checked_float(name: str, value: object, low: float, high: float) -> float:
    number = None
    if not isinstance(value, bool | str | bytes):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None or not isfinite(number) or not low <= number <= high:
        raise RequestError(f"{name} must be a finite number from {low:g} to {high:g}, got {_show(value)}")
    return number


def _checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop must be a string or at most {MAX_STOP_STRINGS} of them, got {_show(stop)}")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {_show(text)}")
    return tuple(strings)


def _checked_stop_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids must be a sequence of at most {MAX_STOP_IDS} ids, got {_show(ids)}")
    return tuple(checked_int("a stop token id", token, 0, 2**31 - 1) for token in ids)


def _show(value: object) -> str:
    """A value for a message, without its whole length: a request may hold anything."""
    if isinstance(value, str | bytes | list | tuple | dict | set) and len(value) > 16:
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return f"{type(value).__name__} {str(value)[:80]!r}" if not isinstance(value, int | float) else str(value)
