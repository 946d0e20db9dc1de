"""What passes between scheduler and runner: one step's work and its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from pagedattn import Mask

from .request import Request

UNKNOWN = -1
"""Stands among a request's tokens for its last one, where the device has drawn it and nobody has read it yet."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the tokens a block holds, and the window (None: every token is kept)."""

    block_size: int
    sliding_window: int | None = None
    _mask: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: the scheduler asks it for every request of every step.
        object.__setattr__(self, "_mask", Mask(sliding_window=self.sliding_window))

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, reads."""
        return self._mask.first_needed_block(num_computed_tokens, self.block_size)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, if it is computed at most `chunk` tokens at a time."""
        need, window = -(-num_tokens // self.block_size), self.sliding_window
        return need if window is None else min(need, -(-(window - 1 + chunk) // self.block_size) + 1)


@dataclass(frozen=True, slots=True)
class SwapRoom:
    """Host memory for the blocks of preempted requests.

    `tokens_per_block` is how many tokens can be computed in the time that one block takes there and back.
    """

    num_blocks: int = 0
    tokens_per_block: float = 0.0


class ScheduledRequest(NamedTuple):
    """Tokens `request.token_ids[start : start + num_tokens]` run; `start` is what was computed when scheduled.

    `samples`: whether the last row is sampled, `start + num_tokens == len(request.token_ids)`.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One batch. Decodes (one token, start > 0) come first.

    Blocks are moved before anything else runs, all layers of each: first `swap_out`, then `swap_in`, then `copies`.
    `fresh_blocks` were handed out for this step and hold what others left there, unless the runner zeroes them between
    `swap_out` and the rest.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_decodes: int
    copies: tuple[tuple[int, int], ...]
    """(source block, target block)."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, host block)."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, block)."""
    fresh_blocks: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(item.num_tokens for item in self.scheduled)


class SampledToken(NamedTuple):
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
    def swap_room(self) -> SwapRoom: ...

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


class Launched(Protocol):
    """A step that a runner has begun."""

    def read(self) -> Sequence[SampledToken | None]:
        """Wait for its tokens, as `Runner.execute` returns them."""
        ...


@runtime_checkable
class Launches(Protocol):
    """A runner that can begin a step before the one before it has ended.

    Steps run one after another in the order of their launches. An UNKNOWN token of a request is the one that its step
    before has drawn, or 0 where that was an error. `prefers_overlap` says whether it gains by that.
    """

    prefers_overlap: bool

    def launch(self, step: Step) -> Launched: ...
