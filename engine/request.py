"""The mutable state of one sequence. Scheduler and KVCacheManager write it; the runner only reads it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedattn.cache.prefix_tree import PrefixNode


class RequestStatus(Enum):
    """Where a request is. PREEMPTED is waiting again, after its blocks were taken away."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOP = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORT = auto()
    FINISHED_ERROR = auto()

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "error" for a finished request, else None."""
        return _REASONS.get(self)


_REASONS = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORT: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class SwappedRequest:
    """What a swapped request goes on from: its progress and, per group, the content and the host blocks of its table.

    `contents[g][i]` is the content of table entry i, for every entry that carried a key; `places[g]` maps the entries
    that were copied to their host blocks.
    """

    num_computed_tokens: int
    num_cached_tokens: int
    contents: list[list[PrefixNode]]
    places: list[dict[int, int]]


class Request:
    """One sequence: its tokens, how many of them are computed, and where their keys and values lie.

    Between steps `len(block_ids[g]) == ceil(num_computed_tokens / block_size[g])` (more with lookahead), position p of
    group g lies in block `block_ids[g][p // block_size[g]]`, and block 0 stands where a sliding window moved past.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "cache_salt",
        "commit_at",
        "explanation",
        "fork_of",
        "last_prefix_nodes",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_hits",
        "num_released",
        "num_slots",
        "prompt_len",
        "request_id",
        "sampling",
        "seed",
        "skip_prefix_cache_reads",
        "status",
        "stop_ids",
        "swapped",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: array[int],
        sampling: SamplingParams,
        *,
        arrival: int,
        max_total_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """A waiting request over prompt `token_ids` (an `array("i")` that it owns from now on).

        Args:
            arrival: its place in the order of service; smaller is served first and preempted last.
            max_total_tokens: it ends with "length" at this many tokens, the prompt included.
            stop_ids: it ends with "stop" at one of these: eos (unless ignored) and the stop ids of `sampling`.
            seed: sampling depends on this and the position of the token only.
            cache_salt: only requests with an equal one share cached blocks.
        """
        self.request_id = request_id
        self.token_ids = token_ids
        self.prompt_len = len(token_ids)
        self.sampling = sampling
        self.arrival = arrival
        self.max_total_tokens = max_total_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.cache_salt = cache_salt
        self.skip_prefix_cache_reads = False
        # A request with the same prompt whose blocks this one may share.
        self.fork_of: Request | None = None
        self.status = RequestStatus.WAITING
        self.explanation: str | None = None
        self.num_preemptions = 0
        self.num_prompt_hits: int | None = None
        # What it goes on from after a preemption by swap; kept until the step that brings it back has succeeded.
        self.swapped: SwappedRequest | None = None
        self.clear_cache_state()

    def clear_cache_state(self) -> None:
        """Forget tables and progress: nothing of this request is in the cache (the caller freed the blocks)."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_ids: list[list[int]] = []
        # Tokens that the tables hold room for, and the num_computed_tokens from which commit() has work to do.
        self.num_slots = 0
        self.commit_at = 0
        # Per group: blocks that carry a key, the content of the last of them, blocks given back to the null block.
        self.num_cached_blocks: list[int] = []
        self.last_prefix_nodes: list[PrefixNode | None] = []
        self.num_released: list[int] = []

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status in _REASONS

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.prompt_len

    def ending(self) -> RequestStatus | None:
        """How the last token ends the request, if it does."""
        generated = self.num_generated
        if generated and generated >= self.sampling.min_tokens and self.token_ids[-1] in self.stop_ids:
            return RequestStatus.FINISHED_STOP
        return RequestStatus.FINISHED_LENGTH if len(self.token_ids) >= self.max_total_tokens else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={len(self.token_ids)}, "
            f"computed={self.num_computed_tokens}, blocks={[len(table) for table in self.block_ids]})"
        )
