"""What the engine hands back, and how one sequence's tokens become it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..request import Request, RequestStatus
from ..runner_protocol import Detokenizer
from ..scheduler_output import SampledToken


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished completion.

    Attributes:
        index: which of the request's n completions it is.
        text: decoded tokens, cut before a stop string; "" without a tokenizer.
        token_ids: generated tokens, the stop token included.
        finish_reason: "stop", "length", "abort" or "error".
        explanation: more about the reason, where there is more to say.
        logprobs: log probability of each token, where asked for.
        top_logprobs: per token, the best tokens and their log probabilities, where asked for.
        cached_tokens: prompt tokens that were taken from the cache.
        time_to_first_token: seconds from add_request to the first token; None without one.
        time_per_token: mean seconds from one token to the next; None with fewer than two, and after an abort.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    explanation: str | None
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[dict[int, float], ...] | None
    cached_tokens: int
    time_to_first_token: float | None
    time_per_token: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and its n completions. The properties are those of the first one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first completion took from the cache."""
        return self.outputs[0].cached_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from add_request to the first completion's first token."""
        return self.outputs[0].time_to_first_token

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds between tokens of the first completion."""
        return self.outputs[0].time_per_token


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one completion. The last one has `finish_reason`, and no more text comes after it.

    `text` may lag behind `token_ids`: half characters and what may become a stop string are held back.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    finish_reason: str | None = None
    completion: CompletionOutput | None = None


class SequenceOutput:
    """Collects one sequence's output as its tokens come."""

    __slots__ = (
        "_detokenizer",
        "_first_time",
        "_logprobs",
        "_make_detokenizer",
        "_num_pushed",
        "_num_sent",
        "_sent",
        "_started",
        "_text",
        "_top_logprobs",
        "_whole_text_at_end",
        "index",
        "problem",
        "request",
        "result",
        "token_by_token",
        "verdict",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        make_detokenizer: Callable[[], Detokenizer] | None,
        *,
        streams: bool,
        started: float,
    ) -> None:
        """Collect for completion `index`; `started` is the time of add_request, `streams` asks for deltas."""
        sampling = request.sampling
        self.request = request
        self.index = index
        self.result: CompletionOutput | None = None
        self._num_pushed = 0
        # How the text ends the request, if it does, and what is wrong with it.
        self.verdict: RequestStatus | None = None
        self.problem: str | None = None
        # Whether tokens must be looked at one by one; where not, a token costs nothing until the end.
        self.token_by_token = streams or bool(sampling.stop) or sampling.logprobs is not None
        self._whole_text_at_end = not streams and not sampling.stop
        self._make_detokenizer = make_detokenizer
        self._detokenizer: Detokenizer | None = None
        self._started = started
        self._first_time: float | None = None
        self._text = ""
        self._sent = 0
        self._num_sent = 0
        self._logprobs: list[float] | None = [] if sampling.logprobs is not None else None
        self._top_logprobs: list[dict[int, float]] = []

    def saw_token(self, now: float) -> None:
        """Note the time of the first token; later calls change nothing."""
        if self._first_time is None:
            self._first_time = now

    def push(self, sampled: SampledToken) -> None:
        """Take the next generated token; sets `verdict` where its text completes a stop string or cannot be decoded."""
        if self._logprobs is not None:
            self._logprobs.append(float("nan") if sampled.logprob is None else sampled.logprob)
            self._top_logprobs.append(sampled.top_logprobs or {})
        self._push_text(sampled.token_id)

    def replay(self) -> None:
        """Begin the text again from the request's tokens, after an interrupt that may have struck in its middle."""
        request = self.request
        self._detokenizer, self._text, self._num_pushed, self.verdict = None, "", 0, None
        if self._logprobs is not None:
            missing = request.num_generated - len(self._logprobs)
            self._logprobs += [float("nan")] * missing
            self._top_logprobs += [{} for _ in range(request.num_generated - len(self._top_logprobs))]
        for token in request.token_ids[request.prompt_len :] if self.token_by_token else ():
            self._push_text(token)

    def take_delta(self) -> tuple[str, tuple[int, ...]]:
        """Text that is certain and tokens, as far as they were not taken before."""
        end = len(self._text)
        if self.result is None:
            end -= max((_overlap(self._text, stop) for stop in self.request.sampling.stop), default=0)
        text, self._sent = self._text[self._sent : end], max(self._sent, end)
        tokens = tuple(self.request.token_ids[self.request.prompt_len + self._num_sent :])
        self._num_sent += len(tokens)
        return text, tokens

    def last_logprobs(self) -> tuple[float | None, dict[int, float] | None]:
        """Log probabilities of the last token, where they were asked for."""
        return (self._logprobs[-1], self._top_logprobs[-1]) if self._logprobs else (None, None)

    def finish(self, now: float) -> CompletionOutput:
        """The result, once the request has ended."""
        if self.result is not None:
            return self.result
        request = self.request
        tokens = request.token_ids[request.prompt_len :]
        if self.verdict is None:
            cut = len(tokens) - (request.status is RequestStatus.FINISHED_STOP)
            self._text += self._decoded(tokens[:cut].tolist() if self._whole_text_at_end else [], last=True)
        if self.problem is not None:
            request.status, request.explanation = RequestStatus.FINISHED_ERROR, self.problem
        later, first = len(tokens) - 1, self._first_time
        timed = first is not None and later > 0 and request.status is not RequestStatus.FINISHED_ABORT
        self.result = CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=tuple(tokens),
            finish_reason=request.status.finish_reason or "",
            explanation=request.explanation,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            top_logprobs=None if self._logprobs is None else tuple(self._top_logprobs),
            cached_tokens=request.num_prompt_hits or 0,
            time_to_first_token=None if first is None else first - self._started,
            time_per_token=(now - first) / later if timed and first is not None else None,
        )
        return self.result

    def _push_text(self, token_id: int) -> None:
        request = self.request
        self._num_pushed += 1
        ends_here = request.status is RequestStatus.FINISHED_STOP and self._num_pushed == request.num_generated
        if self._whole_text_at_end or ends_here or self.verdict is not None:
            return
        before = len(self._text)
        self._text += self._decoded([token_id])
        if self._num_pushed >= request.sampling.min_tokens:
            self._cut_at_stop(before)

    def _decoded(self, tokens: list[int], last: bool = False) -> str:
        """Text of more tokens. What a tokenizer raises ends this request, and must not reach the others of the step."""
        if self._make_detokenizer is None:
            return ""
        try:
            detokenizer = self._detokenizer = self._detokenizer or self._make_detokenizer()
            text = detokenizer.push(tokens) if tokens else ""
            return text + detokenizer.flush() if last else text
        except Exception as error:
            self.verdict, self.problem = RequestStatus.FINISHED_ERROR, f"its tokens cannot be decoded: {error}"
            return ""

    def _cut_at_stop(self, before: int) -> None:
        """Cut the text before the earliest stop string that ends after `before` characters."""
        found = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self.request.sampling.stop]
        hits = [at for at in found if at >= 0]
        if hits:
            self._text = self._text[: min(hits)]
            self.verdict = RequestStatus.FINISHED_STOP


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
