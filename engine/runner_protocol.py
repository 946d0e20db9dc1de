"""What the engine needs of a runner, of its tokenizer and of a step that it has begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pagedattn import CommonAttentionMetadata, PagedKVCache

from .kv_group import KVGroup, SwapConfig
from .scheduler_output import SampledToken, SchedulerOutput


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


@runtime_checkable
class HasPlaceholders(Protocol):
    """A runner that knows which token ids stand for other inputs than text, and for what ("an image")."""

    @property
    def placeholder_tokens(self) -> Mapping[int, str]: ...


class StepObserver(Protocol):
    """What a runner calls after the layers of an eager step; captured ones are not seen."""

    def saw_step(self, cache: PagedKVCache, common_by_group: Mapping[int, CommonAttentionMetadata], /) -> bool:
        """Look at the cache; whether the next step is wanted too."""
        ...


@runtime_checkable
class Observed(Protocol):
    """A runner whose steps may be looked at: it calls the observer until that wants no more."""

    observer: StepObserver | None


class Runner(Protocol):
    """What the engine needs of a model.

    `execute` runs one step and returns, aligned with `step.scheduled`, a token where `samples` is set and None
    elsewhere. It may raise: the engine then takes the step back, and the same tokens may come again with other blocks,
    so a runner must read tables from the request each time and keep no progress of its own.
    """

    @property
    def num_kv_blocks(self) -> int: ...

    @property
    def swap_config(self) -> SwapConfig: ...

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

    def execute(self, step: SchedulerOutput) -> list[SampledToken | None]: ...


class Launched(Protocol):
    """A step that a runner has begun."""

    def read(self) -> Sequence[SampledToken | None]:
        """Wait for its tokens, as `Runner.execute` returns them."""
        ...


@runtime_checkable
class Launches(Protocol):
    """A runner that can begin a step before the one before it has ended.

    Steps run one after another in the order of their launches. A PLACEHOLDER_TOKEN of a request is the one that
    its step before has sampled, or 0 where that was an error. `prefers_overlap` says whether it gains by that.
    """

    prefers_overlap: bool

    def launch(self, step: SchedulerOutput) -> Launched: ...
