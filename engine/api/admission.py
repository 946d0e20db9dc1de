"""Which requests the engine takes, and what it keeps of one until its last completion has ended."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass
from random import Random

from pagedattn.errors import RequestError

from ..request import Request
from ..runner_protocol import Runner
from ..sampling_params import SamplingParams
from ..scheduler.scheduler import Scheduler
from .outputs import CompletionOutput, RequestOutput, SequenceOutput, TokenDelta
from .prompts import Prompt, encode_prompt

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that was found servable, not yet queued. It ends at `max_total_tokens`, the prompt included."""

    prompt: str | None
    token_ids: array[int]
    sampling: SamplingParams
    max_total_tokens: int
    cache_salt: str | None
    skip_prefix_cache_reads: bool


def check_request(
    prompt: Prompt,
    sampling: SamplingParams | None,
    cache_salt: str | None,
    skip_prefix_cache_reads: bool,
    runner: Runner,
    scheduler: Scheduler,
) -> CheckedRequest:
    """Check all that can be known before a request runs.

    Raises:
        RequestError: it cannot be served by this model and cache.
    """
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams, got {type(sampling).__name__}")
    if cache_salt is not None and not _is_name(cache_salt):
        raise RequestError(f"cache_salt must be None (share with all) or text of 1 to {_MAX_NAME} characters")
    if not isinstance(skip_prefix_cache_reads, bool):
        raise RequestError(f"skip_prefix_cache_reads must be a bool, got {type(skip_prefix_cache_reads).__name__}")
    if sampling.stop and runner.tokenizer is None:
        raise RequestError("stop strings need a tokenizer, which the model folder lacks; use stop_token_ids")
    limit = runner.max_model_len
    text, tokens = encode_prompt(prompt, tokenizer=runner.tokenizer, vocab_size=runner.vocab_size, max_tokens=limit - 1)
    total = limit if sampling.max_tokens is None else min(limit, len(tokens) + sampling.max_tokens)
    # The last token of a request is never computed; of the others, the prompt and one more must fit.
    computed = min(len(tokens) + 1, total - 1)
    if not scheduler.fits(computed):
        need, have = scheduler.kv.blocks_for(computed, 1), scheduler.kv.pool.num_usable
        raise RequestError(
            f"a prompt of {len(tokens)} tokens needs {need} blocks and the KV cache has {have}; "
            "shorten it or raise num_kv_blocks"
        )
    return CheckedRequest(text, tokens, sampling, total, cache_salt, skip_prefix_cache_reads)


def check_name(request_id: object) -> str:
    """A request id that a caller chose; RequestError unless it is short text."""
    if not _is_name(request_id):
        raise RequestError(f"request_id must be text of 1 to {_MAX_NAME} characters, got {type(request_id).__name__}")
    return str(request_id)


def sequence_names(request_id: str, n: int) -> list[str]:
    """The ids of a request's n completions."""
    return [request_id, *(f"{request_id}/{index}" for index in range(1, n))]


class OutputQueue:
    """What is ready for one caller, who wants whole outputs or (streams) deltas, and the ids that have not ended."""

    __slots__ = ("deltas", "ids", "outputs", "streams")

    def __init__(self, *, streams: bool = False) -> None:
        self.streams = streams
        self.ids: set[str] = set()
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: deque[TokenDelta] = deque()


class TrackedRequest:
    """One request of a user: its sequences, their completions as they end, and who waits for them."""

    __slots__ = ("checked", "completions", "inbox", "prompt_index", "request_id", "sequences")

    def __init__(self, request_id: str, checked: CheckedRequest, inbox: OutputQueue, prompt_index: int) -> None:
        self.request_id = request_id
        self.checked = checked
        self.inbox = inbox
        self.prompt_index = prompt_index
        self.sequences: list[SequenceOutput] = []
        self.completions: dict[int, CompletionOutput] = {}

    def open_sequences(self, runner: Runner, arrivals: int, draw: Random) -> None:
        """Make the n sequences, which arrive after `arrivals` others; seeds that the request leaves open are drawn."""
        checked, sampling, started = self.checked, self.checked.sampling, time.perf_counter()
        eos = () if sampling.ignore_eos else runner.eos_token_ids
        for index, name in enumerate(sequence_names(self.request_id, sampling.n)):
            request = Request(
                name,
                checked.token_ids[:],
                sampling,
                arrival=arrivals + index,
                max_total_tokens=checked.max_total_tokens,
                stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
                seed=draw.getrandbits(63) if sampling.seed is None else sampling.seed + index,
                cache_salt=checked.cache_salt,
            )
            request.skip_prefix_cache_reads = checked.skip_prefix_cache_reads
            request.fork_of = self.sequences[0].request if index else None
            make = runner.make_detokenizer if runner.tokenizer is not None else None
            streams = self.inbox.streams
            self.sequences.append(SequenceOutput(request, index, make, streams=streams, started=started))

    @property
    def ended(self) -> bool:
        """Whether every completion has ended."""
        return len(self.completions) == len(self.sequences)

    def deliver(self, sequence: SequenceOutput, completion: CompletionOutput | None) -> None:
        """Put what is new of one sequence, or the whole request where that was its last completion, into the inbox.

        The completion is noted last, so that after an interrupt it is delivered again rather than never.
        """
        if self.inbox.streams:
            self.inbox.deltas.append(self._delta(sequence, completion))
        if completion is None:
            return
        completions = {**self.completions, sequence.index: completion}
        if len(completions) == len(self.sequences):
            if not self.inbox.streams:
                self.inbox.outputs[self.request_id] = self._output(completions)
            self.inbox.ids.discard(self.request_id)
        self.completions = completions

    def _output(self, completions: dict[int, CompletionOutput]) -> RequestOutput:
        in_order = tuple(completions[index] for index in sorted(completions))
        return RequestOutput(self.request_id, self.checked.prompt, tuple(self.checked.token_ids), in_order)

    def _delta(self, sequence: SequenceOutput, completion: CompletionOutput | None) -> TokenDelta:
        text, tokens = sequence.take_delta()
        logprob, top_logprobs = sequence.last_logprobs() if tokens else (None, None)
        reason = completion.finish_reason if completion is not None else None
        where = (self.request_id, self.prompt_index, sequence.index)
        return TokenDelta(*where, text, tokens, logprob, top_logprobs, reason, completion)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_NAME
