"""What passes between scheduler and runner: one step's work and its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .request import Request


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the tokens a block holds, and the window (None: every token is kept)."""

    block_size: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens `request.token_ids[start : start + num_tokens]` run; `start` is what was computed when scheduled."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last row is sampled: `start + num_tokens == len(request.token_ids)`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One batch. Decodes (one token, start > 0) come first; `copies` are made before anything else runs."""

    scheduled: tuple[ScheduledRequest, ...]
    num_decodes: int
    copies: tuple[tuple[int, int], ...]
    """(source block, target block), all layers."""

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. With `error` (the logits of this request were NaN) token_id is -1 and the request ends."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    error: str | None = None


class Detokenizer(Protocol):
    """Turns one request's tokens into text piece by piece; characters split over tokens are held back."""

    def push(self, token_ids: list[int], /) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str, /) -> list[int]: ...


@runtime_checkable
class Describes(Protocol):
    """A runner that can say which attention it has."""

    def describe(self) -> str: ...


@runtime_checkable
class Closes(Protocol):
    """A runner that holds what must be given back, such as processes."""

    def close(self) -> None: ...


class Runner(Protocol):
    """What the engine needs of a model.

    `execute` runs one step and returns, aligned with `step.scheduled`, a token where `samples` is set and None
    elsewhere. It may raise: the engine then takes the step back, and the same tokens may come again with other blocks,
    so a runner must read tables from the request each time and keep no progress of its own.
    """

    @property
    def num_kv_blocks(self) -> int: ...

    @property
    def kv_groups(self) -> Sequence[KVGroup]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def make_detokenizer(self) -> Detokenizer: ...

    def execute(self, step: Step) -> list[SampledToken | None]: ...
