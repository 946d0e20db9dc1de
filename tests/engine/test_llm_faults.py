"""Faults: each hurts one request or one call, never another request, and leaves every block accounted for."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from fake_runner import FakeDetokenizer, FakeRunner, FakeTokenizer, expected, fake_llm, greedy
from invariants import check_idle, check_scheduler, run_out

import pagedattn.cache.block_pool
import pagedattn.cache.prefix_tree
import pagedattn.engine
from pagedattn.engine import KVGroup, SchedulerOutput
from pagedattn.errors import CapacityError, EngineDeadError, PagedAttnError, RequestError, describe_error

BOOKKEEPING = (
    os.path.dirname(pagedattn.engine.__file__),
    pagedattn.cache.block_pool.__file__,
    pagedattn.cache.prefix_tree.__file__,
)
PROMPTS = [[index, 5, 8, 13, 21, 34, 55][: 2 + index % 6] for index in range(12)]


class Fault(Exception):
    """The model failed."""


def fail_at(runner: FakeRunner, call: int, error: BaseException, after: bool) -> None:
    """Let the runner's n-th step raise, before it wrote anything or after it wrote all."""
    calls = iter(range(10_000))

    def maybe(step: SchedulerOutput) -> None:
        if next(calls) == call:
            raise error

    runner.after, runner.before = (maybe, runner.before) if after else (runner.after, maybe)


@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_step_can_be_retried_wherever_it_fails(after: bool, swap_blocks: int) -> None:
    """At every step of a run the model fails once; the retry gives the same tokens, and nothing failed is cached."""
    total, failures, preemptions, swaps = 0, 0, 0, 0
    while failures == total:
        runner = FakeRunner(18, [KVGroup(4), KVGroup(4, 9)], swap_blocks=swap_blocks)
        llm = fake_llm(runner, max_num_batched_tokens=12, max_prefill_share=0.5)
        fail_at(runner, total, Fault(), after)
        names = [llm.add_request(prompt, greedy(11)) for prompt in PROMPTS]
        tokens: dict[str, list[int]] = {}
        try:
            run_out(llm, tokens)
        except Fault:
            failures += 1
            check_scheduler(llm._scheduler)
            assert llm.stats().counters.rollbacks == 1
            run_out(llm, tokens)
        assert [tokens[name] for name in names] == [expected(prompt, greedy(11)) for prompt in PROMPTS]
        preemptions += llm.stats().counters.preemptions
        swaps += llm.stats().counters.swapped_in_blocks
        check_idle(llm)
        total += 1
    assert failures >= 50 and preemptions > 0 and (swaps > 0) == (swap_blocks > 0)


def test_an_error_in_generate_leaves_the_engine_empty() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    for call in (0, 3, 7):
        fail_at(runner, call, Fault(), after=True)
        with pytest.raises(Fault):
            llm.generate(PROMPTS, greedy(9))
        check_idle(llm)
    assert [list(output.token_ids) for output in llm.generate(PROMPTS, greedy(9))] == [
        expected(prompt, greedy(9)) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("device"), MemoryError("host"), MemoryError()])
def test_out_of_memory_is_a_capacity_error(error: Exception) -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    fail_at(runner, 2, error, after=False)
    name = llm.add_request([1, 2, 3], greedy(9))
    llm.step()
    llm.step()
    with pytest.raises(CapacityError, match="max_num_batched_tokens") as caught:
        llm.step()
    assert caught.value.__cause__ is error and f"taken back ({describe_error(error)})" in str(caught.value)
    assert run_out(llm)[name] == expected([1, 2, 3], greedy(9))


def test_a_dead_device_says_so_every_time() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    fail_at(runner, 1, EngineDeadError("device failed"), after=False)
    with pytest.raises(EngineDeadError, match="device failed"):
        llm.generate(PROMPTS, greedy(9))
    for again in (llm.step, lambda: llm.add_request([1]), lambda: llm.generate([1])):
        with pytest.raises(EngineDeadError, match="device failed"):
            again()
    assert len(runner.steps) == 1


def test_a_runner_that_breaks_its_contract_is_an_error_not_a_hang() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    execute, runner.execute = runner.execute, lambda step: []  # type: ignore[method-assign, assignment]
    name = llm.add_request([1, 2], greedy(3))
    with pytest.raises(PagedAttnError, match="runner must return"):
        llm.step()
    runner.execute = execute  # type: ignore[method-assign]
    assert run_out(llm)[name] == expected([1, 2], greedy(3))


def test_broken_logits_end_one_request_alone() -> None:
    runner = FakeRunner(tokenizer=FakeTokenizer())
    llm = fake_llm(runner, max_num_seqs=4)
    runner.broken = lambda request: request.prompt_len == 5 and request.num_generated == 3
    outputs = llm.generate(PROMPTS, greedy(9))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        truth = expected(prompt, greedy(9))
        if len(prompt) == 5:
            assert (output.finish_reason, list(output.token_ids)) == ("error", truth[:3])
            assert output.outputs[0].explanation == "no token has a finite logit"
        else:
            assert (output.finish_reason, list(output.token_ids)) == ("length", truth)
    assert sum(output.finish_reason == "error" for output in outputs) == 2
    check_idle(llm)
    assert all(llm.generate(prompt, greedy(2))[0].cached_tokens == 0 for prompt in PROMPTS if len(prompt) == 5)


@pytest.mark.parametrize("options", [{}, {"stop": "@"}])
def test_text_that_cannot_be_decoded_ends_one_request_alone(options: dict[str, str]) -> None:
    class Picky(FakeDetokenizer):
        def push(self, token_ids: Sequence[int]) -> str:
            if bad in token_ids:
                raise ValueError("no such token")
            return super().push(token_ids)

    truths = [expected(prompt, greedy(9)) for prompt in PROMPTS]
    bad = truths[3][4]
    runner = FakeRunner(tokenizer=FakeTokenizer())
    runner.make_detokenizer = Picky  # type: ignore[method-assign]
    llm = fake_llm(runner)
    reasons = []
    for output, truth in zip(llm.generate(PROMPTS, greedy(9, **options)), truths, strict=True):
        assert list(output.token_ids) == truth[: len(output.token_ids)]
        assert (output.finish_reason == "error") == (bad in truth)
        assert output.finish_reason == "length" or "no such token" in str(output.outputs[0].explanation)
        reasons.append(output.finish_reason)
    assert reasons[3] == "error" and 0 < reasons.count("error") < len(reasons)
    check_idle(llm)


def test_abort_in_every_state() -> None:
    llm = fake_llm(FakeRunner(17), max_num_batched_tokens=16, max_prefill_share=0.5)
    keep = llm.add_request([9] * 9, greedy(30), request_id="keep")
    running = llm.add_request([8] * 5, greedy(30))
    chunked = llm.add_request([7] * 30, greedy(2))
    waiting = llm.add_request([6] * 30, greedy(2))
    llm.step()
    request = llm._owners[chunked][1].request
    assert 0 < request.num_computed_tokens < 30 and waiting in llm._scheduler.waiting
    for name in (running, chunked, waiting):
        free = llm.stats().num_free_blocks
        held = sum(len(table) for table in llm._owners[name][1].request.block_ids)
        assert llm.abort(name) and llm.stats().num_free_blocks == free + held
        assert not llm.abort(name) and not llm.abort("unknown")
        check_scheduler(llm._scheduler)
    reasons = {output.request_id: output.finish_reason for output in llm.step()}
    assert reasons == dict.fromkeys((running, chunked, waiting), "abort")
    assert run_out(llm) == {keep: expected([9] * 9, greedy(30))}
    check_idle(llm)


def test_abort_while_preempted() -> None:
    llm = fake_llm(FakeRunner(14), max_num_batched_tokens=64)
    names = [llm.add_request([index] * 8, greedy(24)) for index in range(3)]
    while not llm.stats().counters.preemptions:
        llm.step()
    (victim,) = [request.request_id for request in llm._scheduler.waiting.values() if request.num_preemptions]
    assert llm.abort(victim) and not llm.abort(victim)
    tokens = run_out(llm)
    for index, name in enumerate(names):
        truth = expected([index] * 8, greedy(24))
        assert tokens[name] == (truth if name != victim else truth[: len(tokens[name])])
    check_idle(llm)


def test_abort_of_a_request_ends_all_its_completions() -> None:
    llm = fake_llm()
    name = llm.add_request([1, 2, 3, 4, 5, 6], greedy(20, n=3))
    for _ in range(4):
        llm.step()
    assert llm.stats().num_running == 3 and llm.abort(name)
    (output,) = llm.step()
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert output.token_ids == tuple(expected([1, 2, 3, 4, 5, 6], greedy(20))[: len(output.token_ids)])
    check_idle(llm)


def test_duplicate_ids_are_refused_and_hurt_nobody() -> None:
    llm = fake_llm()
    llm.add_request([1, 2], greedy(5, n=2), request_id="a")
    for taken in ("a", "a/1"):
        with pytest.raises(RequestError, match="taken"):
            llm.add_request([3], request_id=taken)
    assert run_out(llm) == {"a": expected([1, 2], greedy(5))}
    assert llm.add_request([3], greedy(1), request_id="a") == "a"
    run_out(llm)


def test_a_bad_prompt_in_a_batch_runs_none_of_it() -> None:
    runner = FakeRunner()
    llm = fake_llm(runner)
    with pytest.raises(RequestError, match="prompt 1: prompt must have 1 to 255 tokens"):
        llm.generate([[1], [], [2]], greedy(5))
    assert not runner.steps
    check_idle(llm)
