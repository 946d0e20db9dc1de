"""LLM: generate text from prompts, all at once or token by token."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pagedattn.errors import RequestError, UnsupportedError

from ..config import EngineConfig
from ..garbage import freeze_while_alive
from ..models.folder import ModelFolder
from ..models.tokenizer import Tokenizer
from ..runner_protocol import Closes, Describes, Launches, Runner
from ..sampling_params import SamplingParams
from .admission import CheckedRequest, OutputQueue
from .chat_encoding import encode_chat
from .chat_template import ChatTemplate
from .engine import Engine
from .outputs import RequestOutput, TokenDelta
from .prompts import Prompt, is_batch

if TYPE_CHECKING:
    from tqdm import tqdm

_SECONDS_PER_REFRESH = 0.5
_PACKAGES = ("safetensors", "tokenizers", "tqdm")  # of the extra `engine`; others are asked for where they are used


class LLM(Engine):
    """A model and its engine in one object.

    `generate` and `stream` take one prompt or many; `add_request`, `step` and `abort` are for loops of your own. All of
    them may be mixed, from one thread: each call gets the outputs of its own requests.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """Load a model folder.

        Args:
            model: folder with config.json and safetensors; a tokenizer is needed for text only.
            options: fields of `EngineConfig`.

        Raises:
            InvalidInputError: an unknown option, or a bad value.
            UnsupportedError, WeightsError, SecurityError, CapacityError: the model cannot be loaded or served.
        """
        config = EngineConfig.from_options(model, options)
        runner = _make_runner(config)
        self._start(config, runner)
        on_gpu = isinstance(runner, Launches) and runner.prefers_overlap
        if on_gpu if config.freeze_gc is None else config.freeze_gc:
            freeze_while_alive(self)

    @classmethod
    def from_runner(cls, config: EngineConfig, runner: Runner) -> LLM:
        """An LLM over a runner of your own."""
        llm = cls.__new__(cls)
        llm._start(config, runner)
        return llm

    def _start(self, config: EngineConfig, runner: Runner) -> None:
        super().__init__(config, runner)
        self._template: ChatTemplate | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        cache_salt: str | None = None,
        skip_prefix_cache_reads: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, and return when all have ended.

        Args:
            prompts: text, token ids, or a sequence of either.
            sampling_params: for all prompts, or one for each.
            progress: show a progress bar; None shows one on a terminal.
            cache_salt, skip_prefix_cache_reads: as `add_request`.

        Returns:
            One output per prompt, in their order. A request that fails alone says so in its finish_reason.

        Raises:
            RequestError: a prompt cannot be served; none of them was run.
        """
        checked = self._check_all(prompts, sampling_params, cache_salt, skip_prefix_cache_reads)
        inbox = OutputQueue()
        try:
            order = [self._queue(request, inbox) for request in checked]
            with _progress_bar(len(order), progress) as bar:
                meter = None if bar is None else _Meter(bar, self)
                while inbox.ids:
                    self._advance()
                    if meter is not None:
                        meter.show(len(inbox.outputs))
        finally:
            self._abort_all(inbox)
        return [inbox.outputs[request_id] for request_id in order]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        skip_prefix_cache_reads: bool = False,
    ) -> Iterator[TokenDelta]:
        """Generate for one prompt or many, and hand out what each step adds as it comes.

        Arguments are checked at the call, requests are queued at the first `next`. Closing the iterator, or leaving it
        by an exception, aborts what has not ended. Several streams may be read in turn; each gets its own deltas.

        Raises:
            RequestError: as `generate`.
        """
        checked = self._check_all(prompts, sampling_params, cache_salt, skip_prefix_cache_reads)
        return self._stream(checked)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **variables: Any,
    ) -> RequestOutput:
        """Answer a conversation (`[{"role": "user", "content": "..."}]`) through the model's chat template.

        Args:
            variables: further names for the template, such as `tools=[...]`.

        Raises:
            UnsupportedError: the model folder has no chat template or no tokenizer.
            RequestError, SecurityError: the template refuses the messages, or breaks its limits.
        """
        return self.generate(self.encode_chat(messages, **variables), sampling_params, progress=False)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids of a conversation, as `chat` sends them: a prompt for `generate` and `stream`."""
        tokenizer = self.runner.tokenizer
        if self._template is None and isinstance(tokenizer, Tokenizer):
            self._template = ChatTemplate.from_folder(
                ModelFolder(self.config.model),
                tokenizer.named_tokens,
                time_limit=self.config.chat_template_timeout,
                memory_limit=self.config.chat_template_memory,
            )
        if self._template is None or not isinstance(tokenizer, Tokenizer):
            raise UnsupportedError("chat needs a tokenizer and a chat template in the model folder; use generate")
        return encode_chat(self._template, tokenizer, messages, **{"add_generation_prompt": True, **variables})

    def close(self) -> None:
        """End the processes of a tensor-parallel model; the engine is dead afterwards. Without any, nothing happens.

        What is not closed ends with the object or with this process.
        """
        if isinstance(self.runner, Closes):
            self.runner.close()

    def describe_attention(self) -> str:
        """Which attention backend the model's layers have, and why every other one was passed over."""
        runner = self.runner
        return runner.describe() if isinstance(runner, Describes) else type(runner).__name__

    def _stream(self, checked: Sequence[CheckedRequest]) -> Iterator[TokenDelta]:
        inbox = OutputQueue(streams=True)
        try:
            for index, request in enumerate(checked):
                self._queue(request, inbox, prompt_index=index)
            while inbox.ids or inbox.deltas:
                if not inbox.deltas:
                    self._advance()
                while inbox.deltas:
                    yield inbox.deltas.popleft()
        finally:
            self._abort_all(inbox)

    def _check_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        skip_reads: bool,
    ) -> list[CheckedRequest]:
        """Check every prompt before any is queued."""
        batch: list[Any] = list(prompts) if is_batch(prompts) else [prompts]
        if isinstance(sampling_params, list | tuple):
            if len(sampling_params) != len(batch):
                raise RequestError(f"got {len(sampling_params)} sampling_params for {len(batch)} prompts")
            each: list[Any] = list(sampling_params)
        else:
            each = [sampling_params] * len(batch)
        checked = []
        for index, (prompt, params) in enumerate(zip(batch, each, strict=True)):
            try:
                checked.append(self._check(prompt, params, cache_salt, skip_reads))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from None
        return checked


def _make_runner(config: EngineConfig) -> Runner:
    """The model in this process, or in one process per rank."""
    try:
        if config.tensor_parallel_size > 1:
            from ..parallel.driver import ParallelRunner

            return ParallelRunner(config)
        from ..worker.runner import ModelRunner

        return ModelRunner(config)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise UnsupportedError(f"the engine needs {error.name}: pip install 'pagedattn[engine]'") from error


class _Meter:
    """Finished requests on a progress bar, and tokens per second, formatted twice a second and not every step."""

    def __init__(self, bar: tqdm, engine: Engine) -> None:
        self._bar, self._engine = bar, engine
        self._start = self._last = time.perf_counter()
        self._tokens = engine.stats().counters.generated_tokens

    def show(self, num_finished: int) -> None:
        self._bar.update(num_finished - self._bar.n)
        now = time.perf_counter()
        if now - self._last >= _SECONDS_PER_REFRESH:
            self._last = now
            tokens = self._engine.stats().counters.generated_tokens - self._tokens
            self._bar.set_postfix_str(f"{tokens / (now - self._start):.0f} tokens/s")


def _progress_bar(total: int, progress: bool | None) -> AbstractContextManager[tqdm | None]:
    """A bar, where one was asked for or standard error is a terminal.

    A hidden one would cost interrupts: what `__del__` of a bar raises is lost.
    """
    if not (_on_terminal() if progress is None else progress):
        return nullcontext()
    from tqdm import tqdm

    return tqdm(total=total, unit="request", dynamic_ncols=True)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None, a writer of one's own, or closed
        return False
