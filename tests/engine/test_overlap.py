"""Steps launched before the tokens of the last are read: the same tokens, whatever is found out a step late."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_runner import EOS, FakeRunner, FakeTokenizer, LaunchingRunner, expected, fake_llm, greedy
from invariants import check_idle, check_scheduler, run_out
from tiny_models import hf_model, save

from pagedattn import BlockPool
from pagedattn.engine import (
    LLM,
    KVCacheManager,
    KVGroup,
    Request,
    RequestStatus,
    SampledToken,
    SamplingParams,
    SchedulerOutput,
)
from pagedattn.engine.scheduler.scheduler import Scheduler
from pagedattn.engine.scheduler_output import PLACEHOLDER_TOKEN
from pagedattn.errors import CapacityError, EngineDeadError, InvalidInputError, PagedAttnError

PROMPTS = [[index, 5, 8, 13, 21, 34, 55][: 2 + index % 6] for index in range(12)]
TRUTHS = [expected(prompt, greedy(9)) for prompt in PROMPTS]


class Fault(Exception):
    """The device failed."""


def overlapped(*args: Any, **options: Any) -> tuple[LaunchingRunner, LLM]:
    eos = options.pop("eos_token_ids", ())
    runner = LaunchingRunner(*args, eos_token_ids=eos, tokenizer=FakeTokenizer())
    return runner, fake_llm(runner, **{"overlap": True, **options})


def count_to(call: int, error: BaseException) -> Any:
    calls = iter(range(10_000))

    def maybe(step: SchedulerOutput) -> None:
        if next(calls) == call:
            raise error

    return maybe


def tokens(llm: LLM, sampling: SamplingParams | None = None) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, sampling or greedy(9))]


def test_who_overlaps() -> None:
    for runner, option, overlaps in (
        (LaunchingRunner(), None, True),
        (LaunchingRunner(), False, False),
        (FakeRunner(), True, False),
    ):
        assert fake_llm(runner, overlap=option)._loop.overlap is overlaps
    with pytest.raises(InvalidInputError, match="overlap"):
        fake_llm(overlap=1)


def test_a_step_is_launched_before_the_last_is_read() -> None:
    runner, llm = overlapped()
    order: list[tuple[str, SchedulerOutput]] = []
    launch = runner.launch
    runner.launch = lambda step: order.append(("launch", step)) or launch(step)  # type: ignore[method-assign, assignment, return-value]
    runner.on_read = lambda step: order.append(("read", step))
    assert tokens(llm) == TRUTHS
    launched = [step for what, step in order if what == "launch"]
    assert launched == [step for what, step in order if what == "read"]
    ahead = [order.index(("read", one)) > order.index(("launch", other)) for one, other in pairwise(launched)]
    # Where all that runs is known to end, there is nothing to launch ahead.
    assert len(ahead) > 15 and sum(ahead) >= len(ahead) - 2
    assert runner.unknown > 50
    check_idle(llm)


def test_what_a_token_ends_runs_one_step_too_many_and_leaves_nothing() -> None:
    runner, llm = overlapped(eos_token_ids=[EOS])
    sampling = greedy(200)
    truths = [expected(prompt, sampling, eos=[EOS]) for prompt in PROMPTS]
    assert tokens(llm, sampling) == truths
    ended = sum(truth[-1] == EOS for truth in truths)
    assert 3 < ended == llm.stats().counters.dropped_tokens
    check_idle(llm)
    assert all(PLACEHOLDER_TOKEN not in request.token_ids for request, _ in runner._drawn.values())


def test_a_known_last_token_is_not_followed_by_another_step() -> None:
    _, llm = overlapped()
    assert tokens(llm) == TRUTHS
    assert llm.stats().counters.dropped_tokens == 0
    serial = fake_llm(FakeRunner())
    assert tokens(serial) == TRUTHS
    assert llm.stats().counters.scheduled_tokens >= serial.stats().counters.scheduled_tokens


def test_stop_strings_and_deltas() -> None:
    outputs, streams = [], []
    for overlap in (False, True):
        _, llm = overlapped(overlap=overlap)
        params = [greedy(30, stop=["ab", "q"], logprobs=1) for _ in PROMPTS]
        made = llm.generate(PROMPTS, params)
        outputs.append([(out.text, out.token_ids, out.finish_reason, out.outputs[0].logprobs) for out in made])
        deltas = list(llm.stream(PROMPTS[:3], greedy(9)))
        assert all(PLACEHOLDER_TOKEN not in delta.token_ids for delta in deltas)
        streams.append([[d.token_ids for d in deltas if d.prompt_index == index] for index in range(3)])
        check_idle(llm)
    assert outputs[0] == outputs[1] and streams[0] == streams[1]
    assert {reason for _, _, reason, _ in outputs[0]} == {"stop", "length"}


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_launch_is_taken_back_and_the_step_before_counts(after: bool) -> None:
    total, failures, preemptions = 0, 0, 0
    while failures == total:
        runner, llm = overlapped(18, [KVGroup(4), KVGroup(4, 9)], max_num_batched_tokens=12, max_prefill_share=0.5)
        setattr(runner, "after" if after else "before", count_to(total, Fault()))
        names = [llm.add_request(prompt, greedy(9)) for prompt in PROMPTS]
        found: dict[str, list[int]] = {}
        try:
            run_out(llm, found)
        except Fault:
            failures += 1
            check_scheduler(llm._scheduler)
            assert llm.stats().counters.rollbacks == 1
            run_out(llm, found)
        assert [found[name] for name in names] == TRUTHS
        preemptions += llm.stats().counters.preemptions
        check_idle(llm)
        total += 1
    assert failures > 30 and preemptions > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Fault()], ids=["interrupt", "error"])
def test_whatever_a_read_raises_costs_time_and_no_token(error: BaseException) -> None:
    total, failures = 0, 0
    while failures == total:
        runner, llm = overlapped(18, max_num_batched_tokens=12)
        runner.on_read = count_to(total, error)
        names = [llm.add_request(prompt, greedy(9)) for prompt in PROMPTS]
        found: dict[str, list[int]] = {}
        try:
            run_out(llm, found)
        except type(error):
            failures += 1
            run_out(llm, found)
        assert [found[name] for name in names] == TRUTHS
        check_idle(llm)
        total += 1
    assert failures > 15


def test_an_interrupted_launch_is_computed_again() -> None:
    for call in range(0, 15, 2):
        runner, llm = overlapped()
        runner.after = count_to(call, KeyboardInterrupt())
        names = [llm.add_request(prompt, greedy(9)) for prompt in PROMPTS]
        with pytest.raises(KeyboardInterrupt):
            run_out(llm)
        found = run_out(llm)
        found |= {name: list(out.token_ids) for name, out in llm._inbox.outputs.items()}
        assert [found[name] for name in names if name in found] == [
            truth for name, truth in zip(names, TRUTHS, strict=True) if name in found
        ]
        check_idle(llm)


def test_out_of_memory_and_death() -> None:
    runner, llm = overlapped()
    runner.before = count_to(3, MemoryError("host"))
    names = [llm.add_request(prompt, greedy(9)) for prompt in PROMPTS]
    with pytest.raises(CapacityError, match="taken back"):
        run_out(llm)
    found = run_out(llm)
    assert [found[name] for name in names] == TRUTHS
    for place in ("before", "on_read"):
        runner, llm = overlapped()
        setattr(runner, place, count_to(2, EngineDeadError("device failed")))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="device failed"):
                tokens(llm)


def test_a_runner_that_breaks_its_contract_is_an_error_not_a_hang() -> None:
    runner, llm = overlapped()
    execute, runner.execute = runner.execute, lambda step: [None] * len(step.scheduled)  # type: ignore[method-assign]
    name = llm.add_request([1, 2], greedy(3))
    with pytest.raises(PagedAttnError, match="runner must return"):
        run_out(llm)
    runner.execute = execute  # type: ignore[method-assign]
    assert run_out(llm)[name] == expected([1, 2], greedy(3))


def test_broken_logits_end_one_request_alone() -> None:
    runner, llm = overlapped()
    runner.broken = lambda request: request.prompt_len == 7 and request.num_generated == 3
    for output, truth in zip(llm.generate(PROMPTS, greedy(9)), TRUTHS, strict=True):
        broken = len(output.prompt_token_ids) == 7
        assert output.finish_reason == ("error" if broken else "length")
        assert list(output.token_ids) == (truth[:3] if broken else truth)
    check_idle(llm)
    runner.broken = lambda request: False
    assert all(llm.generate(prompt, greedy(2))[0].cached_tokens == 0 for prompt in PROMPTS if len(prompt) == 7)


@pytest.mark.parametrize("error", [None, "no token has a finite logit"])
def test_what_a_request_computed_is_poisoned_though_it_was_preempted_in_flight(error: str | None) -> None:
    kv = KVCacheManager(BlockPool(7), [KVGroup(4)])
    scheduler = Scheduler(kv, max_num_seqs=4, max_num_batched_tokens=64)
    old, new = (
        Request(name, array("i", [first] * 8), greedy(90), arrival=first, max_total_tokens=90)
        for name, first in (("old", 1), ("new", 2))
    )
    scheduler.add(old)
    scheduler.add(new)
    before = None
    while new.status is not RequestStatus.PREEMPTED:
        if before is not None:
            scheduler.advance_with_placeholders(before)
        step = scheduler.schedule()
        if before is not None and new.status is not RequestStatus.PREEMPTED:
            scheduler.apply_tokens([SampledToken(5) for _ in before.scheduled])
        before, last = step, before
    assert last is not None and [item.request for item in last.scheduled] == [old, new]
    assert new.token_ids[-1] == PLACEHOLDER_TOKEN and not new.block_ids
    advanced = scheduler.apply_tokens(
        [SampledToken(5), SampledToken(5) if error is None else SampledToken(-1, error=error)]
    )
    assert [request for request, _ in advanced] == [old, new] and PLACEHOLDER_TOKEN not in new.token_ids
    assert new.status is (RequestStatus.PREEMPTED if error is None else RequestStatus.FINISHED_ERROR)
    assert list(scheduler.waiting) == (["new"] if error is None else [])
    twin = Request("twin", array("i", [2] * 9), greedy(9), arrival=9, max_total_tokens=90)
    assert kv.lookup(twin).num_tokens == (8 if error is None else 0)


def test_a_request_that_ends_for_lack_of_room_may_have_stopped_a_token_before() -> None:
    prompt = [3, 1, 4]
    whole = expected(prompt, greedy(60))
    for length in range(14, 22):
        reasons = []
        for overlap in (False, True):
            _, llm = overlapped(6, overlap=overlap)
            (out,) = llm.generate([prompt], greedy(60, stop_token_ids=[whole[length]]))
            reasons.append((out.finish_reason, out.token_ids, out.outputs[0].explanation))
            check_idle(llm)
        assert reasons[0] == reasons[1]


def test_abort_while_a_step_is_in_flight() -> None:
    _, llm = overlapped()
    names = [llm.add_request(prompt, greedy(20)) for prompt in PROMPTS[:4]]
    found: dict[str, list[int]] = {}
    for victim in names[:3]:
        for _ in range(3):
            found |= {output.request_id: list(output.token_ids) for output in llm.step()}
        assert llm.abort(victim)
        check_scheduler(llm._scheduler)
    run_out(llm, found)
    for name, prompt in zip(names, PROMPTS, strict=False):
        assert found[name] == expected(prompt, greedy(20))[: len(found[name])]
    assert len(found[names[3]]) == 20
    check_idle(llm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    return save(hf_model("qwen3", torch.float32), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 4, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 1.2, "min_tokens": 9, "stop_token_ids": list(range(40, 140)), "logprobs": 2, "seed": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [None, (1, 4)])
def test_a_model_draws_the_same_tokens(sizes: Any, sampling: dict[str, Any], folder: Path) -> None:
    """Penalties depend on tokens that nobody has read: the device knows them."""
    found = []
    for overlap in (False, True):
        options: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float64",
            "num_kv_blocks": 96,
            "max_num_batched_tokens": 24,
        }
        llm = LLM(str(folder), graph_sizes=sizes, overlap=overlap, **options)
        outputs = llm.generate([[5, 9, 200, 17], list(range(40, 77)), [11]], SamplingParams(max_tokens=20, **sampling))
        found.append([(out.token_ids, out.finish_reason, out.outputs[0].top_logprobs) for out in outputs])
    assert found[0] == found[1]
    assert len({token for tokens, *_ in found[0] for token in tokens}) > 8
