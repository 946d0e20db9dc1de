"""OpenAI's protocol for openai_server.py: what requests may ask for, and how answers, events and errors look."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagedattn import errors
from pagedattn.engine import CompletionOutput, SamplingParams, TokenDelta, TokenStream

Json = dict[str, Any]

# Names that SamplingParams shares with the protocol, and what it has beyond (extra_body= of OpenAI's client).
SAMPLING = ("temperature", "top_p", "n", "stop", "seed", "max_tokens", "presence_penalty", "frequency_penalty")
BEYOND = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
COMMON = {*SAMPLING, *BEYOND, "model", "stream", "stream_options", "logprobs", "user"}
COMPLETION, CHAT = {*COMMON, "prompt"}, {*COMMON, "messages", "max_completion_tokens", "top_logprobs"}
ROLES = ("system", "developer", "user", "assistant")
LOWEST_LOGPROB = -9999.0  # JSON has no -inf
# The first that fits. A SecurityError is a chat template that broke its limits.
STATUS = {
    errors.EngineDeadError: (503, "service_unavailable"),
    errors.CapacityError: (503, "service_unavailable"),
    errors.QueueFullError: (429, "rate_limit_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.UnsupportedError: (400, "invalid_request_error"),
    errors.SecurityError: (400, "invalid_request_error"),
    RequestValidationError: (400, "invalid_request_error"),
    Exception: (500, "server_error"),
}


def refuse_others(given: Json, known: Iterable[str]) -> None:
    """Refuse what is not known, unless its value asks for nothing."""
    for name, value in given.items():
        nothing = value is None or value is False or value in ("", [], {})
        if name not in known and not nothing:
            raise errors.RequestError(f"{name} is not supported by this server; leave it out")


def sampling_params(body: Json, chat: bool) -> SamplingParams:
    options = {name: body[name] for name in (*SAMPLING, *BEYOND) if body.get(name) is not None}
    if not chat:
        return SamplingParams(logprobs=body.get("logprobs"), **options)
    if body.get("logprobs") not in (None, False, True):
        raise errors.RequestError("logprobs must be true or false; top_logprobs is how many")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise errors.RequestError("top_logprobs needs logprobs=true")
    limit = body.get("max_completion_tokens")
    options["max_tokens"] = options.get("max_tokens") if limit is None else limit
    return SamplingParams(logprobs=body.get("top_logprobs") or 0 if body.get("logprobs") else None, **options)


def prompts(body: Json) -> list[Any]:
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list):
        raise errors.RequestError("prompt must be text, token ids, or a list of either")
    return [prompt] if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt) else prompt


def messages(body: Json) -> list[Json]:
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise errors.RequestError("messages must be a list of messages, one at least")
    for message in given:
        refuse_others(message, ("role", "content"))
        if message.get("role") not in ROLES:
            raise errors.RequestError(f"role must be one of {', '.join(ROLES)}, got {message.get('role')!r:.100}")
    return [{"role": message["role"], "content": text_of(message.get("content"))} for message in given]


def text_of(content: Any) -> str:
    """Content is text, or a list of parts, which must be text too."""
    if isinstance(content, str):
        return content
    bad = [part for part in content if not _is_text(part)] if isinstance(content, list) else [content]
    if bad:
        got = repr(bad[0].get("type")) if isinstance(bad[0], dict) else type(bad[0]).__name__
        raise errors.RequestError(f"content must be text, or a list of parts of type text, got {got}")
    return "".join(part["text"] for part in content)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def wants_usage(body: Json) -> bool:
    """Whether a stream ends with its usage."""
    options = body.get("stream_options") or {}
    if body.get("stream") not in (None, False, True) or not isinstance(options, dict):
        raise errors.RequestError("stream must be true or false, and stream_options an object")
    refuse_others(options, ("include_usage",))
    if options and not body.get("stream"):
        raise errors.RequestError("stream_options needs stream=true")
    return bool(options.get("include_usage"))


def finish_reason(completion: CompletionOutput) -> str:
    if completion.finish_reason not in ("stop", "length"):
        raise errors.PagedAttnError(completion.explanation or f"the request ended with {completion.finish_reason}")
    return completion.finish_reason


def usage(prompts: Sequence[Sequence[int]], completions: Sequence[CompletionOutput]) -> Json:
    prompt, new = sum(map(len, prompts)), sum(len(one.token_ids) for one in completions)
    cached = {"cached_tokens": sum(one.cached_tokens for one in completions if one.index == 0)}
    total = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**total, "prompt_tokens_details": cached}


def error_object(error: Exception) -> tuple[int, Json]:
    """Status and body of an error."""
    if isinstance(error, HTTPException):
        status, kind, message = error.status_code, "invalid_request_error", str(error.detail)
    else:
        status, kind = next(known for of, known in STATUS.items() if isinstance(error, of))
        message = str(error) or type(error).__name__
    if isinstance(error, RequestValidationError):
        message = f"the body must be a JSON object: {error.errors()[0]['msg']}"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": None}}


class TextOffsets:
    """Where a completion's tokens begin in its text, in characters; parts of one character begin where it does."""

    def __init__(self, detokenizer: Any) -> None:
        self.detokenizer, self.length = detokenizer, 0

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self.length)
            self.length += len(self.detokenizer.push([token_id]))
        return found


class Answer:
    """What one request is answered with, in the form of its endpoint."""

    def __init__(self, body: Json, runner: Any, chat: bool) -> None:
        self.decode, self.chat = runner.tokenizer.decode, chat
        self.new_offsets: Callable[[], TextOffsets] = lambda: TextOffsets(runner.make_detokenizer())
        self.streamed: defaultdict[tuple[int, int], TextOffsets] = defaultdict(self.new_offsets)  # by prompt and index
        name, form = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self.head: Json = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
        self.head["object"] = f"{form}.chunk" if chat and body.get("stream") else form

    def whole(self, prompts: Sequence[Sequence[int]], completions: Sequence[CompletionOutput]) -> Json:
        choices = []
        for index, one in enumerate(completions):
            text = {"message": {"role": "assistant", "content": one.text}} if self.chat else {"text": one.text}
            logprobs = None
            if one.logprobs is not None and one.top_logprobs is not None:
                offsets = self.new_offsets().push(one.token_ids)
                logprobs = self.logprobs(one.token_ids, one.logprobs, one.top_logprobs, offsets)
            choices.append({"index": index, **text, "logprobs": logprobs, "finish_reason": finish_reason(one)})
        return {**self.head, "choices": choices, "usage": usage(prompts, completions)}

    async def events(self, stream: TokenStream, n: int, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events, until every completion has ended or one has failed."""
        completions = []
        with closing(stream):
            try:
                for index in range(n * len(stream.prompt_token_ids) if self.chat else 0):
                    yield self.event([{"index": index, "delta": {"role": "assistant", "content": ""}}])
                async for delta in stream:
                    if delta.completion is not None:
                        completions.append(delta.completion)
                    if delta.text or delta.completion is not None or delta.logprob is not None:
                        yield self.event([self.piece(delta, n)])
                if include_usage:
                    yield self.event([], usage=usage(stream.prompt_token_ids, completions))
                yield "data: [DONE]\n\n"
            except Exception as error:
                yield f"data: {json.dumps(error_object(error)[1])}\n\n"

    def piece(self, delta: TokenDelta, n: int) -> Json:
        text = {"delta": {"content": delta.text} if delta.text else {}} if self.chat else {"text": delta.text}
        logprobs = None
        if delta.logprob is not None:
            offsets = self.streamed[delta.prompt_index, delta.index].push(delta.token_ids)
            logprobs = self.logprobs(delta.token_ids[-1:], [delta.logprob], [delta.top_logprobs or {}], offsets[-1:])
        reason = None if delta.completion is None else finish_reason(delta.completion)
        return {"index": delta.prompt_index * n + delta.index, **text, "logprobs": logprobs, "finish_reason": reason}

    def event(self, choices: list[Json], **more: Json) -> str:
        return f"data: {json.dumps({**self.head, 'choices': choices, **more})}\n\n"

    def logprobs(
        self, ids: Sequence[int], own: Sequence[float], best: Sequence[dict[int, float]], offsets: Sequence[int]
    ) -> Json:
        tokens = [self.token(*pair) for pair in zip(ids, own, strict=True)]
        tops = [[self.token(*pair) for pair in row.items()] for row in best]
        if self.chat:
            return {"content": [{**token, "top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]}
        # Several tokens may be parts of characters, with the same text: the likeliest, which stands first, counts.
        named = [{token["token"]: token["logprob"] for token in reversed(top)} for top in tops]
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": named if any(named) else None,
            "text_offset": offsets,
        }

    def token(self, token_id: int, logprob: float) -> Json:
        text = self.decode([token_id], skip_special_tokens=False)
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(LOWEST_LOGPROB, logprob), "bytes": known}
