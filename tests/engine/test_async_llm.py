"""AsyncLLM: coroutines that share an engine get their own tokens, whoever else goes away, fails or comes too late."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from fake_runner import FakeDetokenizer, FakeRunner, FakeTokenizer, LaunchingRunner, expected, fake_llm, greedy
from invariants import check_idle

from pagedattn.engine import LLM, AsyncLLM, SamplingParams, TokenStream
from pagedattn.errors import EngineDeadError, QueueFullError, RequestError

T = TypeVar("T")
PROMPTS = [[index, 5, 8, 13, 21, 34, 55][: 2 + index % 6] for index in range(12)]
LONG = greedy(200)


def run(llm: LLM, use: Callable[[AsyncLLM], Awaitable[T]]) -> T:
    """What `use` returns; nothing of its requests is left."""

    async def main() -> T:
        async with AsyncLLM(llm) as engine:
            return await asyncio.wait_for(use(engine), 20)

    result = asyncio.run(main())
    check_idle(llm)
    assert not llm.step() and not llm.take_deltas()
    return result


async def tokens_of(stream: TokenStream) -> dict[tuple[int, int], list[int]]:
    """By prompt and completion; that a completion's deltas are its whole is checked."""
    tokens: dict[tuple[int, int], list[int]] = {}
    async for delta in stream:
        tokens.setdefault((delta.prompt_index, delta.index), []).extend(delta.token_ids)
        if delta.completion is not None:
            assert tokens[delta.prompt_index, delta.index] == list(delta.completion.token_ids)
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 10
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("runner", [FakeRunner, LaunchingRunner])
def test_generate_and_stream_beside_each_other(runner: type[FakeRunner]) -> None:
    llm = fake_llm(runner(tokenizer=FakeTokenizer()))

    async def use(engine: AsyncLLM) -> None:
        streams = [await engine.stream(prompt, greedy(9)) for prompt in PROMPTS]
        whole = asyncio.gather(engine.generate(PROMPTS, greedy(7)), engine.generate("text", greedy(4)))
        streamed = await asyncio.gather(*map(tokens_of, streams))
        outputs, text = await whole
        assert [list(output.token_ids) for output in outputs] == [expected(prompt, greedy(7)) for prompt in PROMPTS]
        assert streamed == [{(0, 0): expected(prompt, greedy(9))} for prompt in PROMPTS]
        truth = expected(FakeTokenizer().encode("text"), greedy(4))
        assert (text[0].prompt, text[0].text) == ("text", FakeDetokenizer().push(truth))

    run(llm, use)
    assert max(len(step.scheduled) for step in llm.runner.steps) > 4  # type: ignore[attr-defined]


def test_a_stream_of_many_prompts_with_several_completions() -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=6)

    async def use(engine: AsyncLLM) -> None:
        stream = await engine.stream(PROMPTS[:4], params)
        assert stream.prompt_token_ids == tuple(map(tuple, PROMPTS[:4]))
        tokens = await tokens_of(stream)
        assert list(tokens[2, 1]) == expected(PROMPTS[2], SamplingParams(seed=4, max_tokens=6))
        assert sorted(tokens) == [(prompt, index) for prompt in range(4) for index in range(2)]
        assert await tokens_of(stream) == {} and await engine.generate([]) == []

    run(fake_llm(), use)


def test_the_event_loop_runs_while_a_step_does() -> None:
    runner, passed = FakeRunner(), threading.Event()
    runner.before = lambda step: None if passed.wait(10) else pytest.fail("the event loop stood still")

    async def use(engine: AsyncLLM) -> None:
        task = asyncio.ensure_future(engine.generate([1, 2], greedy(3)))
        await until(lambda: engine.llm.stats().num_running == 1)
        passed.set()
        assert list((await task)[0].token_ids) == expected([1, 2], greedy(3))

    run(fake_llm(runner), use)


@pytest.mark.parametrize("how", ["close", "forget", "break", "cancel generate", "cancel stream"])
def test_who_goes_away_ends_its_requests_alone(how: str) -> None:
    runner = FakeRunner(256)
    runner.before = lambda step: time.sleep(0.002)
    llm = fake_llm(runner)

    async def leave(engine: AsyncLLM) -> None:
        three_run = until(lambda: llm.stats().num_running == 3)
        if how == "cancel generate":
            task = asyncio.ensure_future(engine.generate([PROMPTS[1], PROMPTS[2]], LONG))
            await three_run
            task.cancel()
            return
        stream = await engine.stream([PROMPTS[1], PROMPTS[2]], LONG)
        await three_run
        if how == "cancel stream":
            task = asyncio.ensure_future(tokens_of(stream))
            await asyncio.sleep(0.01)
            task.cancel()
        elif how == "break":
            async for _ in stream:
                break
        elif how == "close":
            stream.close()
            stream.close()
            assert await tokens_of(stream) == {}

    async def use(engine: AsyncLLM) -> None:
        other = asyncio.ensure_future(engine.generate(PROMPTS[3], LONG))
        await until(lambda: llm.stats().num_running == 1)
        await leave(engine)
        gc.collect()
        await until(lambda: llm.stats().num_running < 2)
        assert not other.done()
        assert list((await other)[0].token_ids) == expected(PROMPTS[3], LONG)

    run(llm, use)
    assert llm.stats().counters.generated_tokens < 400


def test_cancelled_while_the_request_is_queued() -> None:
    """Whatever point of `stream` a cancellation strikes, nothing is left."""
    runner = FakeRunner()
    runner.before = lambda step: time.sleep(0.002)
    llm, cancelled = fake_llm(runner), 0

    async def use(engine: AsyncLLM) -> None:
        nonlocal cancelled
        for turns in range(40):
            task = asyncio.ensure_future(engine.stream(PROMPTS[3], LONG))
            for _ in range(turns % 8):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0001 * (turns // 8))
            task.cancel()
            await asyncio.wait((task,))
            cancelled += task.cancelled()
        del task
        await until(lambda: not llm.has_unfinished)

    run(llm, use)
    assert cancelled > 10 and 0 < llm.stats().counters.generated_tokens < 400


def test_cancelled_when_the_request_was_just_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has taken it, the caller does not know yet."""
    runner = FakeRunner()
    runner.before = lambda step: time.sleep(0.002)
    llm = fake_llm(runner)
    add = llm.add_request

    async def use(engine: AsyncLLM) -> None:
        def add_and_cancel(*args: Any, **options: Any) -> str:
            request_id = add(*args, **options)
            loop.call_soon_threadsafe(task.cancel)
            return request_id

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(llm, "add_request", add_and_cancel)
        task = asyncio.ensure_future(engine.stream(PROMPTS[3], LONG))
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.has_unfinished)

    run(llm, use)
    assert llm.stats().counters.generated_tokens < 100


def test_bad_requests_run_nothing() -> None:
    llm = fake_llm(max_waiting=3)

    async def use(engine: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=r"^prompt 1: token ids must be from 0 to 96, got 1000$"):
            await engine.generate([[1], [1000]])
        with pytest.raises(RequestError, match=r"^prompt must be token ids"):
            await engine.stream("text without a tokenizer")
        with pytest.raises(RequestError, match="cache_salt"):
            await engine.generate([1], cache_salt="")
        with pytest.raises(QueueFullError, match="max_waiting"):
            await engine.stream([PROMPTS[0]] * 4, greedy(3))
        await until(lambda: not llm.has_unfinished)

    run(llm, use)
    assert llm.stats().counters.generated_tokens == 0


def test_closing_ends_what_runs_and_leaves_the_llm() -> None:
    llm = fake_llm()

    async def main() -> None:
        engine = AsyncLLM(llm)
        calls = [asyncio.ensure_future(engine.generate(PROMPTS[index], LONG)) for index in range(10)]
        await until(lambda: llm.stats().num_running > 0)
        calls += [asyncio.ensure_future(engine.generate(PROMPTS, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and "closed" in str(error)
        for call in (engine.generate([1]), engine.stream([1]), engine.encode_chat([])):
            with pytest.raises(EngineDeadError, match="closed"):
                await call

    runner = llm.runner
    runner.before = lambda step: time.sleep(0.005)  # type: ignore[attr-defined]
    asyncio.run(main())
    check_idle(llm)
    assert list(llm.generate([1, 2], greedy(4))[0].token_ids) == expected([1, 2], greedy(4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagedattn")]
