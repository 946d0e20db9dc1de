"""LLM over a fake model: prompts in, outputs and deltas out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_runner import EOS, FakeDetokenizer, FakeRunner, FakeTokenizer, expected, fake_llm, greedy, next_token
from invariants import check_idle

from pagedattn.engine import LLM, KVGroup, RequestOutput, SamplingParams, TokenDelta
from pagedattn.errors import InvalidInputError, RequestError, UnsupportedError


def text_llm(**options: object) -> LLM:
    return fake_llm(FakeRunner(tokenizer=FakeTokenizer()), **options)


def decode(tokens: list[int]) -> str:
    return FakeDetokenizer().push(tokens)


def test_one_prompt_or_many_as_text_or_ids() -> None:
    llm = text_llm()
    ids = FakeTokenizer().encode("hello")
    same = llm.generate("hello", greedy(5)) + llm.generate(ids, greedy(5)) + llm.generate(["hello", ids], greedy(5))
    assert len(same) == 4 and {output.token_ids for output in same} == {tuple(expected(ids, greedy(5)))}
    assert {output.text for output in same} == {decode(expected(ids, greedy(5)))}
    assert [output.prompt for output in same] == ["hello", None, "hello", None]
    assert all(output.prompt_token_ids == tuple(ids) and output.finish_reason == "length" for output in same)
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "ids", [(1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4), [np.int64(1), 2, 3]]
)
def test_ids_of_any_integer_sequence(ids: object) -> None:
    llm = fake_llm()
    one, two = llm.generate(ids, greedy(4))[0], llm.generate([ids, [5]], greedy(4))[0]  # type: ignore[list-item]
    assert list(one.token_ids) == list(two.token_ids) == expected([1, 2, 3], greedy(4))
    assert one.text == ""


def test_outputs_come_in_order_of_prompts_with_their_own_sampling() -> None:
    llm = fake_llm()
    prompts = [[index, 3] for index in range(20)]
    settings = [greedy(20 - index) for index in range(20)]
    outputs = llm.generate(prompts, settings)
    for prompt, sampling, output in zip(prompts, settings, outputs, strict=True):
        assert list(output.token_ids) == expected(prompt, sampling)
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(prompts[:3], settings[:2])
    check_idle(llm)


def test_seeded_tokens_depend_on_seed_and_position_only() -> None:
    """Alone or in a batch, chunked or not, cached or not, preempted or not: one list of tokens."""
    sampling = SamplingParams(seed=5, max_tokens=24)
    prompt, others = [3, 1, 4, 1, 5, 9, 2], [[index] * 9 for index in range(7)]
    truth = expected(prompt, sampling)
    preemptions = 0
    for blocks, budget in ((64, 32), (14, 32), (64, 3)):
        llm = fake_llm(FakeRunner(blocks), max_num_batched_tokens=budget)
        for _ in range(2):
            outputs = llm.generate([*others[:3], prompt, *others[3:]], sampling)
            assert list(outputs[3].token_ids) == truth
        preemptions += llm.stats().counters.preemptions
    assert preemptions > 0
    drawn = [fake_llm(seed=seed).generate(prompt, SamplingParams(max_tokens=12))[0].token_ids for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("groups", [[KVGroup(4)], [KVGroup(4), KVGroup(4, 6)]], ids=["full", "hybrid"])
@pytest.mark.parametrize("length", [1, 4, 5, 19])
def test_completions_of_one_prompt_share_it(length: int, groups: list[KVGroup], caching: bool) -> None:
    runner = FakeRunner(80, groups)
    llm = fake_llm(runner, enable_prefix_caching=caching)
    prompt, sampling = list(range(length)), SamplingParams(seed=3, max_tokens=9, n=4)
    (output,) = llm.generate(prompt, sampling)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    for completion in output.outputs:
        assert list(completion.token_ids) == expected(prompt, replace(sampling, n=1, seed=3 + completion.index))
        assert completion.cached_tokens == (0 if completion.index == 0 else length - 1)
    copies = sum(len(step.copies) for step in runner.steps)
    assert copies == (3 * len(groups) if (length - 1) % 4 else 0)
    check_idle(llm)


def test_cached_tokens_salts_and_skipped_reads() -> None:
    llm = fake_llm()
    prompt = list(range(14))
    first = llm.generate(prompt, greedy(), cache_salt="a")[0]
    assert [
        llm.generate(prompt, greedy(), cache_salt="a")[0].cached_tokens,
        llm.generate(prompt, greedy(), cache_salt="b")[0].cached_tokens,
        llm.generate(prompt, greedy())[0].cached_tokens,
        llm.generate(prompt, greedy())[0].cached_tokens,
        llm.generate(prompt, greedy(), skip_prefix_cache_reads=True)[0].cached_tokens,
    ] == [12, 0, 0, 12, 0]
    assert first.cached_tokens == 0 and llm.reset_prefix_cache()
    assert llm.generate(prompt, greedy(), cache_salt="a")[0].cached_tokens == 0


def test_stop_tokens_eos_and_min_tokens() -> None:
    prompt, free = [2, 7, 1], expected([2, 7, 1], greedy(40))
    third = free[2]
    llm = fake_llm(FakeRunner(eos_token_ids=[third, EOS]))
    at_eos = llm.generate(prompt, greedy(40))[0]
    assert (at_eos.finish_reason, list(at_eos.token_ids)) == ("stop", free[: free.index(third) + 1])
    assert llm.generate(prompt, greedy(40, ignore_eos=True))[0].token_ids == tuple(free)
    by_id = llm.generate(prompt, greedy(40, ignore_eos=True, stop_token_ids=[free[4]]))[0]
    assert (by_id.finish_reason, len(by_id.token_ids)) == ("stop", free.index(free[4]) + 1)
    late = llm.generate(prompt, greedy(40, min_tokens=free.index(third) + 2))[0]
    assert len(late.token_ids) > free.index(third) + 1


def test_text_leaves_out_the_stop_token() -> None:
    free = expected(FakeTokenizer().encode("hey"), greedy(40))
    llm = fake_llm(FakeRunner(tokenizer=FakeTokenizer(), eos_token_ids=[free[5]]))
    cut = free.index(free[5])
    for sampling in (greedy(40), greedy(40, stop="@"), greedy(40, logprobs=0)):
        output = llm.generate("hey", sampling)[0]
        assert output.text == decode(free[:cut]) and list(output.token_ids) == free[: cut + 1]


def test_stop_strings_cut_the_text_also_across_tokens() -> None:
    llm = text_llm()
    free = decode(expected(FakeTokenizer().encode("abc"), greedy(30)))
    for size in (1, 2, 5):
        stop = free[10 : 10 + size]
        output = llm.generate("abc", greedy(30, stop=["@@", stop]))[0]
        assert output.finish_reason == "stop" and output.text == free[: free.index(stop)]
        assert len(output.token_ids) == free.index(stop) + size
    assert llm.generate("abc", greedy(30, stop="@"))[0].text == free
    at_end = llm.generate("abc", greedy(12, stop=free[11]))[0]
    first = free.index(free[11])
    assert at_end.finish_reason == "stop" and at_end.text == free[:first]
    late = llm.generate("abc", greedy(30, stop=free[2], min_tokens=4))[0]
    assert late.text == (free if free.find(free[2], 3) < 0 else free[: free.find(free[2], 3)])


@pytest.mark.parametrize("streamed", [False, True])
def test_text_held_back_comes_at_the_end_unless_a_stop_string_cut_it(streamed: bool) -> None:
    class Holding(FakeDetokenizer):
        def flush(self) -> str:
            return "!!"

    runner = FakeRunner(tokenizer=FakeTokenizer())
    runner.make_detokenizer = Holding  # type: ignore[method-assign]
    llm = fake_llm(runner)
    free = decode(expected(FakeTokenizer().encode("abc"), greedy(12)))
    for stop, text in (("@", free + "!!"), (free[7], free[: free.index(free[7])])):
        if streamed:
            assert "".join(delta.text for delta in llm.stream("abc", greedy(12, stop=stop))) == text
        else:
            assert llm.generate("abc", greedy(12, stop=stop))[0].text == text


def test_logprobs_are_handed_through() -> None:
    llm = fake_llm()
    output = llm.generate([4, 2], greedy(5, logprobs=1))[0].outputs[0]
    assert output.logprobs == tuple(-float(token) for token in output.token_ids)
    assert output.top_logprobs == tuple({token: -float(token)} for token in output.token_ids)
    assert llm.generate([4, 2], greedy(5))[0].outputs[0].logprobs is None


def test_stream_gives_what_generate_gives() -> None:
    llm = text_llm()
    prompts = ["abc", "hello you"]
    whole = llm.generate(prompts, greedy(10, n=2, logprobs=1))
    parts: dict[tuple[int, int], list[TokenDelta]] = {}
    for delta in llm.stream(prompts, greedy(10, n=2, logprobs=1)):
        parts.setdefault((delta.prompt_index, delta.index), []).append(delta)
    assert sorted(parts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (prompt, index), deltas in parts.items():
        truth = whole[prompt].outputs[index]
        assert len(deltas) == 10 and "".join(delta.text for delta in deltas) == truth.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == truth.token_ids
        assert tuple(delta.logprob for delta in deltas) == truth.logprobs
        assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]
        last = deltas[-1].completion
        assert last is not None and last.text == truth.text and last.token_ids == truth.token_ids
    check_idle(llm)


def test_stream_never_shows_text_of_a_stop_string() -> None:
    llm = text_llm()
    free = decode(expected(FakeTokenizer().encode("abc"), greedy(30)))
    for size in (1, 3, 6):
        stop = free[9 : 9 + size]
        shown = ""
        for delta in llm.stream("abc", greedy(30, stop=[stop, free[3:5] + "@"])):
            shown += delta.text
            assert free[: free.index(stop)].startswith(shown)
        assert shown == free[: free.index(stop)]


def test_streams_may_be_read_in_turn_beside_other_requests() -> None:
    llm = fake_llm()
    one, two = llm.stream([1, 2], greedy(9)), llm.stream([3, 4], greedy(9))
    mine = llm.add_request([5, 6], greedy(3), request_id="mine")
    tokens: tuple[list[int], list[int]] = ([], [])
    for first, second in zip(one, two, strict=True):
        tokens[0].extend(first.token_ids)
        tokens[1].extend(second.token_ids)
    assert tokens == (expected([1, 2], greedy(9)), expected([3, 4], greedy(9)))
    assert llm.generate([7], greedy(2))[0].token_ids == tuple(expected([7], greedy(2)))
    (output,) = llm.step()
    assert output.request_id == mine and list(output.token_ids) == expected([5, 6], greedy(3))
    check_idle(llm)


def test_step_returns_each_request_once() -> None:
    llm = fake_llm()
    names = [llm.add_request([index, 1], greedy(3 + index)) for index in range(5)]
    outputs: list[RequestOutput] = []
    while llm.has_unfinished:
        outputs += llm.step()
    assert [output.request_id for output in outputs] == names and llm.step() == []
    assert len(set(names)) == 5


def test_lengths_end_at_max_model_len() -> None:
    llm = fake_llm(FakeRunner(max_model_len=20))
    output = llm.generate(list(range(15)), greedy(100))[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    output = llm.generate(list(range(19)), SamplingParams(temperature=0.0, max_tokens=None))[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_times_are_reported() -> None:
    output = fake_llm().generate([1, 2, 3], greedy(6))[0].outputs[0]
    assert output.time_to_first_token is not None and output.time_to_first_token > 0
    assert output.time_per_token is not None and output.time_per_token > 0
    assert fake_llm().generate([1, 2, 3], greedy(1))[0].outputs[0].time_per_token is None


def test_progress_bar_shows_requests(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake_llm()
    llm.generate([[1], [2]], greedy(3))
    assert capsys.readouterr().err == ""
    llm.generate([[1], [2]], greedy(3), progress=True)
    assert "2/2" in capsys.readouterr().err


def test_stats_show_queues_blocks_and_counters() -> None:
    llm = fake_llm(max_num_seqs=2)
    for index in range(5):
        llm.add_request([index] * 9, greedy(4))
    llm.step()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (2, 3, 63)
    assert stats.num_free_blocks == 63 - 6 and 0 < stats.cache_use < 1
    while llm.has_unfinished:
        llm.step()
    assert llm.stats().cache_use == 0 and llm.stats().counters.generated_tokens == 20 and llm.stats().hit_rate == 0
    assert stats.counters.steps == 1


def test_unknown_options_and_missing_templates_are_errors() -> None:
    with pytest.raises(InvalidInputError, match="did you mean max_num_seqs"):
        LLM("somewhere", max_num_seq=3)
    with pytest.raises(UnsupportedError, match="chat"):
        fake_llm().chat([{"role": "user", "content": "hi"}])


def test_two_engines_live_side_by_side() -> None:
    one, two = fake_llm(FakeRunner(groups=[KVGroup(3)])), fake_llm(FakeRunner(groups=[KVGroup(8)]))
    streams = one.stream([1, 2, 3], greedy(9)), two.stream([4, 5], greedy(9))
    tokens = [[*first.token_ids, *second.token_ids] for first, second in zip(*streams, strict=True)]
    assert [pair[0] for pair in tokens] == expected([1, 2, 3], greedy(9))
    assert [pair[1] for pair in tokens] == expected([4, 5], greedy(9))
    assert next_token([1]) != next_token([2])
