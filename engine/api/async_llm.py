"""AsyncLLM: coroutines share an LLM, whose steps run on a thread of their own."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from pagedattn.errors import EngineDeadError, RequestError

from ..sampling_params import SamplingParams
from .llm import LLM
from .outputs import RequestOutput, TokenDelta
from .prompts import Prompt, encode_prompt, is_batch

_Item: TypeAlias = "TokenDelta | RequestOutput | BaseException"
_Encoded: TypeAlias = "tuple[str | None, array[int]]"


class AsyncLLM:
    """An LLM for asyncio. One thread runs its steps, another encodes prompts; the event loop waits for neither.

    Make it in the event loop that uses it, and use its `llm` for nothing else until it is closed (`stats` aside):

        async with AsyncLLM(LLM("examples/tiny-qwen3")) as engine:
            async for delta in await engine.stream("The scheduler"):
                print(delta.text, end="")

    A call that is cancelled, and a stream that is closed or forgotten, aborts its requests. Where a step fails, the
    request that came last ends with the error, and the others go on without it; where the engine dies, all end.

    Attributes:
        llm: the LLM; closing this leaves it usable, and does not close it.
        error: what the engine died of, None while it lives.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.error: EngineDeadError | None = None
        self._loop = asyncio.get_running_loop()
        self._engine = ThreadPoolExecutor(1, "pagedattn-engine")
        self._encoder = ThreadPoolExecutor(1, "pagedattn-encoder")
        self._closed = False
        # Of the engine's thread alone: who gets what of which request, and whether a turn is queued.
        self._boxes: dict[str, _Mailbox] = {}
        self._turning = False

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        skip_prefix_cache_reads: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; as `LLM.generate`, with one `sampling_params` for all.

        Raises:
            RequestError, QueueFullError: a prompt cannot be served, or not now; none of them was run.
            EngineDeadError: the engine is dead, or this is closed.
            Exception: whatever else a step failed with, such as CapacityError.
        """
        options = {"cache_salt": cache_salt, "skip_prefix_cache_reads": skip_prefix_cache_reads}
        encoded, box = await self._open(prompts, sampling_params, options)
        with closing(box):
            outputs: dict[str, RequestOutput] = {}
            while len(outputs) < len(encoded):
                item = await box.take()
                if isinstance(item, RequestOutput):
                    outputs[item.request_id] = item
        pairs = zip(box.request_ids, encoded, strict=True)
        return [replace(outputs[request_id], prompt=text) for request_id, (text, _) in pairs]

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        skip_prefix_cache_reads: bool = False,
    ) -> TokenStream:
        """Queue one prompt or many; iterate over what this returns for their tokens.

        Raises:
            RequestError, QueueFullError, EngineDeadError: as `generate`.
        """
        options = {"cache_salt": cache_salt, "skip_prefix_cache_reads": skip_prefix_cache_reads, "stream": True}
        encoded, box = await self._open(prompts, sampling_params, options)
        n = 1 if sampling_params is None else sampling_params.n
        return TokenStream(box, [tuple(ids) for _, ids in encoded], n * len(encoded))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """As `LLM.encode_chat`."""
        self._check_open()
        return await self._loop.run_in_executor(self._encoder, partial(self.llm.encode_chat, messages, **variables))

    async def close(self) -> None:
        """End the threads. What has not ended is aborted, and its callers get an EngineDeadError."""
        if not self._closed:
            self._closed = True
            self._engine.submit(self._end_all, EngineDeadError("the AsyncLLM was closed"))
            for thread in (self._encoder, self._engine):
                await asyncio.to_thread(thread.shutdown)

    async def _open(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[list[_Encoded], _Mailbox]:
        """Encode and queue all prompts, or none."""
        self._check_open()
        encoded = await self._loop.run_in_executor(self._encoder, self._encode, prompts)
        self._check_open()
        box = _Mailbox(self)
        try:
            await self._loop.run_in_executor(self._engine, self._add, box, encoded, sampling, options)
        except BaseException:
            box.close()
            raise
        return encoded, box

    def _forget(self, request_ids: Sequence[str]) -> None:
        if not self._closed:
            self._engine.submit(self._end, request_ids)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the AsyncLLM was closed; make another over its llm")

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[_Encoded]:
        batch: Sequence[Any] = prompts if is_batch(prompts) else [prompts]
        runner, encoded = self.llm.runner, []
        for index, prompt in enumerate(batch):
            try:
                encoded.append(
                    encode_prompt(
                        prompt,
                        tokenizer=runner.tokenizer,
                        vocab_size=runner.vocab_size,
                        max_tokens=runner.max_model_len - 1,
                    )
                )
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(batch) > 1 else str(error)) from None
        return encoded

    # The rest runs on the engine's thread, but for _post's deliveries.

    def _add(
        self, box: _Mailbox, encoded: Iterable[_Encoded], sampling: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        for _, token_ids in encoded:
            request_id = self.llm.add_request(token_ids, sampling, **options)
            box.request_ids.append(request_id)
            self._boxes[request_id] = box
        self._go_on()

    def _go_on(self, anyway: bool = False) -> None:
        """Queue the next turn behind what callers have queued meanwhile."""
        wanted = anyway or self.llm.has_unfinished
        if wanted and not self._turning and not self._closed and self.error is None:
            self._turning = True
            self._engine.submit(self._turn)

    def _turn(self) -> None:
        self._turning, failure = False, None
        outputs: list[RequestOutput] = []
        try:
            outputs = self.llm.step()
        except BaseException as error:  # it would be lost otherwise
            failure = error
        items = [*outputs, *self.llm.take_deltas()]
        news = [(self._boxes[item.request_id], item) for item in items if item.request_id in self._boxes]
        self._post([*news, *self._casualties(failure)])
        self._go_on(anyway=failure is not None)  # a failed step keeps its outputs for the next

    def _casualties(self, error: BaseException | None) -> list[tuple[_Mailbox, _Item]]:
        """Who ends with the error of a step, the youngest alone where the engine lives."""
        if isinstance(error, EngineDeadError):
            self.error = error
            return [(box, EngineDeadError(str(error))) for box in set(self._boxes.values())]
        while error is not None and self._boxes:
            request_id, box = self._boxes.popitem()
            if self.llm.abort(request_id):
                return [(box, error)]
        return []

    def _post(self, news: Sequence[tuple[_Mailbox, _Item]]) -> None:
        def deliver() -> None:
            for box, item in news:
                box.items.put_nowait(item)

        if news:
            try:
                self._loop.call_soon_threadsafe(deliver)
            except RuntimeError:  # the event loop is closed
                self._closed = True

    def _end(self, request_ids: Iterable[str]) -> None:
        aborted = False
        for request_id in request_ids:
            self._boxes.pop(request_id, None)
            with suppress(EngineDeadError):
                aborted |= self.llm.abort(request_id)
        self._go_on(anyway=aborted)  # takes aborted requests out of the engine

    def _end_all(self, error: EngineDeadError) -> None:
        self._post([(box, error) for box in set(self._boxes.values())])
        self._end(list(self._boxes))
        if self.error is None:
            self._turn()


class TokenStream:
    """The tokens of one call of `AsyncLLM.stream`, as they come; ends when every completion has ended.

    Attributes:
        prompt_token_ids: of each prompt. A delta's `prompt_index` counts them.
    """

    def __init__(self, box: _Mailbox, prompt_token_ids: Sequence[tuple[int, ...]], num_open: int) -> None:
        self.prompt_token_ids = tuple(prompt_token_ids)
        self._box = box
        self._num_open = num_open
        self._index = {request_id: index for index, request_id in enumerate(box.request_ids)}

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        """The next delta; raises what the engine died of, or what a step of this request failed with."""
        while self._num_open:
            item = await self._box.take()
            if isinstance(item, TokenDelta):
                self._num_open -= item.completion is not None
                index = self._index[item.request_id]
                return replace(item, prompt_index=index) if index else item
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what has not ended. Safe from any thread, and any number of times."""
        self._num_open = 0
        self._box.close()

    def __del__(self) -> None:
        self._box.close()


class _Mailbox:
    """What the event loop has of the requests of one call. The engine's thread writes `request_ids`."""

    def __init__(self, owner: AsyncLLM) -> None:
        self.request_ids: list[str] = []
        self.items: asyncio.Queue[_Item] = asyncio.Queue()
        self._owner: AsyncLLM | None = owner

    async def take(self) -> _Item:
        item = await self.items.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            with suppress(RuntimeError):  # the event loop is closed
                owner._loop.call_soon_threadsafe(owner._forget, self.request_ids)
