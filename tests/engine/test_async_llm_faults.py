"""AsyncLLM where requests are refused, steps fail or the engine dies: all callers get an answer, nothing is left."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fake_runner import FakeRunner, LaunchingRunner, expected, fake_llm, greedy
from test_async_llm import LONG, PROMPTS, run, tokens_of, until

from pagedattn.engine import AsyncLLM, SchedulerOutput, TokenDelta
from pagedattn.errors import CapacityError, EngineDeadError, QueueFullError


def test_nothing_of_a_refused_stream_stays_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first prompt was queued when the second was refused; the delta of its abort is taken with no step to run."""
    llm, taken = fake_llm(max_waiting=1), list[TokenDelta]()
    take = llm.take_deltas

    def note() -> list[TokenDelta]:
        taken.extend(deltas := take())
        return deltas

    monkeypatch.setattr(llm, "take_deltas", note)

    async def use(engine: AsyncLLM) -> None:
        with pytest.raises(QueueFullError):
            await engine.stream(PROMPTS[:2], greedy(3))
        await until(lambda: [delta.finish_reason for delta in taken] == ["abort"])

    run(llm, use)


def test_a_failing_step_ends_the_youngest_request() -> None:
    """One prompt makes each step fail that has it: that request gets the error, whoever came before goes on."""
    runner = FakeRunner()
    llm, bad = fake_llm(runner), [7, 7, 7]

    def fail(step: SchedulerOutput) -> None:
        if any(list(item.request.token_ids[:3]) == bad for item in step.scheduled):
            raise MemoryError("too large")

    runner.before = fail

    async def use(engine: AsyncLLM) -> None:
        stream = await engine.stream(PROMPTS[3], LONG)
        first = await anext(stream)
        with pytest.raises(CapacityError, match="out of memory"):
            await engine.generate(bad, greedy(5))
        rest = [token async for delta in stream for token in delta.token_ids]
        assert [*first.token_ids, *rest] == expected(PROMPTS[3], LONG) and engine.error is None

    run(llm, use)


def test_an_output_of_the_turn_that_failed_is_delivered() -> None:
    """Overlapped, a step fails at its launch in the same turn that reads the last token of another request."""
    runner, queued, bad = LaunchingRunner(), threading.Event(), [7, 7, 7]

    def fail(step: SchedulerOutput) -> None:
        assert queued.wait(10)
        if [list(item.request.token_ids[:3]) for item in step.scheduled] == [bad]:
            raise ZeroDivisionError

    runner.before = fail

    async def use(engine: AsyncLLM) -> None:
        calls = engine.generate(PROMPTS[3], greedy(3)), engine.generate(bad, greedy(20))
        both = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.05)
        queued.set()
        good, error = await both
        assert isinstance(error, ZeroDivisionError) and not isinstance(good, BaseException)
        assert list(good[0].token_ids) == expected(PROMPTS[3], greedy(3))

    run(fake_llm(runner), use)
    assert any(len(step.scheduled) == 2 for step in runner.steps)


def test_what_the_repair_after_a_failed_step_ends_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older of two streams has its last token when a step cannot be counted; the younger ends with the error."""
    llm, queued = fake_llm(), threading.Event()
    llm.runner.before = lambda step: queued.wait(1)  # type: ignore[attr-defined]
    apply, failures = llm._scheduler.apply_tokens, [ZeroDivisionError("while a step was counted")]

    def fail_once(*args: Any) -> Any:
        advanced = apply(*args)
        if failures and any(request.finished for request, _ in advanced):
            raise failures.pop()
        return advanced

    monkeypatch.setattr(llm._scheduler, "apply_tokens", fail_once)

    async def use(engine: AsyncLLM) -> None:
        older, younger = await engine.stream(PROMPTS[3], greedy(4)), await engine.stream(PROMPTS[4], LONG)
        queued.set()
        good, error = await asyncio.gather(tokens_of(older), tokens_of(younger), return_exceptions=True)
        assert isinstance(error, ZeroDivisionError) and not isinstance(good, BaseException)
        assert good == {(0, 0): expected(PROMPTS[3], greedy(4))}

    run(llm, use)
    assert not failures


def test_a_dead_engine_ends_everybody_with_its_error() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)

    def die(step: SchedulerOutput) -> None:
        if step.scheduled[0].request.num_generated == 3:
            raise EngineDeadError("the device is gone")

    runner.before = die

    async def use(engine: AsyncLLM) -> None:
        calls = [engine.generate(PROMPTS[3], LONG), tokens_of(await engine.stream(PROMPTS[4], LONG))]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and "the device is gone" in str(error)
        assert isinstance(engine.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.generate([1])

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            await asyncio.wait_for(use(engine), 20)

    asyncio.run(main())
