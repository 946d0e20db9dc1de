"""Callers that go away or come at the wrong time: closed streams, interrupts, other threads."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import pytest
from fake_runner import FakeDetokenizer, FakeRunner, FakeTokenizer, expected, fake_llm, greedy
from invariants import check_idle, check_scheduler, run_out

import pagedattn.cache.block_pool
import pagedattn.cache.prefix_tree
import pagedattn.engine
from pagedattn.engine import KVGroup, SchedulerOutput
from pagedattn.errors import RequestError, UnsupportedError

BOOKKEEPING = (
    os.path.dirname(pagedattn.engine.__file__),
    pagedattn.cache.block_pool.__file__,
    pagedattn.cache.prefix_tree.__file__,
)
PROMPTS = [[index, 5, 8, 13, 21, 34, 55][: 2 + index % 6] for index in range(12)]


def test_abort_from_inside_a_step_and_from_another_thread() -> None:
    """Both take effect at the end of the step."""
    runner = FakeRunner()
    llm = fake_llm(runner)
    one, two = llm.add_request([1, 2], greedy(20)), llm.add_request([3, 4], greedy(20))
    llm.step()

    def abort_both(step: SchedulerOutput) -> None:
        assert llm.abort(one)
        thread = threading.Thread(target=llm.abort, args=(two,))
        thread.start()
        thread.join(5)
        assert not thread.is_alive() and llm.stats().num_running == 2

    runner.before = abort_both
    assert sorted(output.request_id for output in llm.step()) == [one, two] and not llm.has_unfinished
    check_idle(llm)


def test_a_second_thread_gets_a_typed_error() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    errors: list[Exception] = []

    def intrude(step: SchedulerOutput) -> None:
        def call(method: Callable[[], object]) -> None:
            try:
                method()
            except Exception as error:
                errors.append(error)

        for method in (llm.step, lambda: llm.add_request([1]), lambda: llm.generate([1]), llm.reset_prefix_cache):
            thread = threading.Thread(target=call, args=(method,))
            thread.start()
            thread.join(5)
        call(llm.step)
        runner.before = lambda step: None

    runner.before = intrude
    assert list(llm.generate([1, 2], greedy(5))[0].token_ids) == expected([1, 2], greedy(5))
    assert len(errors) == 5 and all(isinstance(error, UnsupportedError) for error in errors)
    check_idle(llm)


def test_closing_a_stream_aborts_its_requests_alone() -> None:
    llm = fake_llm()
    other = llm.add_request([9, 9], greedy(12))
    stream = llm.stream([[1, 2, 3], [4, 5, 6]], greedy(12))
    assert next(stream).token_ids
    assert isinstance(stream, Iterator) and llm.stats().num_running == 3
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().num_running == 1
    check_scheduler(llm._scheduler)
    assert run_out(llm)[other] == expected([9, 9], greedy(12))


def test_a_loop_of_ones_own_streams_some_requests_and_not_others() -> None:
    llm = fake_llm()
    streamed, whole = llm.add_request([1, 2], greedy(9), stream=True), llm.add_request([3, 4], greedy(5))
    tokens: list[int] = []
    while not tokens or llm.has_unfinished:
        for output in llm.step():
            assert output.request_id == whole and list(output.token_ids) == expected([3, 4], greedy(5))
            whole = ""
        deltas = llm.take_deltas()
        assert {delta.request_id for delta in deltas} <= {streamed} and len(deltas) < 2
        tokens += [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected([1, 2], greedy(9)) and not whole
    check_idle(llm)


def test_an_output_of_another_calls_steps_waits_for_step() -> None:
    llm = fake_llm()
    ids = {llm.add_request([1, index], greedy(3), request_id=f"r{index}") for index in range(2)}
    llm.generate([5, 6], greedy(20))
    with pytest.raises(RequestError, match="request_id has ended, and step"):
        llm.add_request([1], request_id="r0")
    assert llm.has_unfinished and {one.request_id for one in llm.step()} == ids and not llm.has_unfinished
    assert llm.abort(llm.add_request([7], greedy(50), request_id="r0")) and llm.has_unfinished
    assert [(one.request_id, one.finish_reason) for one in llm.step()] == [("r0", "abort")]
    assert not llm.has_unfinished


def test_an_exception_in_the_consumer_aborts_the_stream() -> None:
    llm = fake_llm()
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream([1, 2, 3], greedy(12)):
            raise ZeroDivisionError
    gc.collect()
    check_idle(llm)
    unread = llm.stream([1, 2, 3], greedy(12))
    del unread
    check_idle(llm)


@pytest.mark.parametrize("blocks", [40, 12])
def test_interrupts_at_any_line_leave_the_engine_usable(blocks: int) -> None:
    """A KeyboardInterrupt anywhere, in the middle of bookkeeping too: the other caller's tokens and text are right."""
    llm = fake_llm(FakeRunner(blocks, [KVGroup(4), KVGroup(4, 6)], tokenizer=FakeTokenizer()))
    interrupted = repaired = 0
    where = [""]
    while where:
        prompt = [9, 9, interrupted % 90]
        other = llm.add_request(prompt, greedy(9, stop="@"))
        cache = llm._scheduler.kv
        with interrupt_after(1 + 29 * interrupted) as where:
            try:
                llm.generate(PROMPTS[:3], greedy(4, n=2, stop="@@"))
            except KeyboardInterrupt:
                interrupted += 1
        outputs = {}
        while other not in outputs:
            outputs |= {output.request_id: output for output in llm.step()}
            check_scheduler(llm._scheduler)
        truth = expected(prompt, greedy(9))
        assert list(outputs[other].token_ids) == truth and outputs[other].text == FakeDetokenizer().push(truth)
        run_out(llm)
        check_idle(llm)
        repaired += llm._scheduler.kv is not cache
    assert interrupted > 100 and repaired > 50
    outputs = llm.generate(PROMPTS, greedy(9))
    assert [list(output.token_ids) for output in outputs] == [expected(prompt, greedy(9)) for prompt in PROMPTS]


@cache  # millions of lines are asked for
def is_bookkeeping(file: str) -> bool:
    return file.startswith(BOOKKEEPING)


@cache
def may_be_interrupted(file: str, number: int) -> bool:
    return not linecache.getline(file, number).strip().startswith("with ")


@contextmanager
def interrupt_after(lines: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt once, before the n-th line of the package that runs; yields where it was.

    Not on a `with`, where Python lets no signal in between taking (or giving back) a lock and its block.
    """
    left, where = iter(range(lines)), []

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return each_line if not where and is_bookkeeping(frame.f_code.co_filename) else None

    def each_line(frame: FrameType, event: str, arg: object) -> Any:
        if where:
            return None
        code, number = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and may_be_interrupted(code, number) and next(left, None) is None:
            where.append(f"{code}:{number}")
            raise KeyboardInterrupt
        return each_line

    sys.settrace(enter)
    try:
        yield where
    finally:
        sys.settrace(None)
