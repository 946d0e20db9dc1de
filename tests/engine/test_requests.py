"""What the engine refuses at the door: settings, sampling parameters and prompts, each with a typed error at once."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from fake_runner import VOCAB, FakeRunner, FakeTokenizer, expected, fake_llm, greedy
from invariants import check_idle

from pagedattn.engine import EngineConfig, KVGroup, SamplingParams
from pagedattn.errors import InvalidInputError, RequestError

HUGE = 10**9
NAN, INF = float("nan"), float("inf")
BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, NAN, INF, "1", None, True)],
    *[("top_p", value) for value in (0, -1, 1.1, NAN, None)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("top_k", value) for value in (-2, 1.0, True, None, 2**40)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5, True)],
    *[("max_tokens", value) for value in (0, -1, HUGE, 1.0, True, "5")],
    *[("min_tokens", value) for value in (-1, 17, HUGE, None)],
    *[("stop", value) for value in ([""], [1], ["a"] * 17, "x" * 257, None, {"a"}, b"a")],
    *[("stop_token_ids", value) for value in ([-1], [1.5], [True], 7, range(HUGE), ["a"])],
    *[("logprobs", value) for value in (-1, 21, HUGE, 1.0, True)],
    *[("repetition_penalty", value) for value in (0, -1, NAN)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN)],
    *[("n", value) for value in (0, 129, HUGE, 1.0, True)],
    ("ignore_eos", 1),
]
BAD_PROMPTS: list[Any] = [
    [],
    np.array([], dtype=np.int32),
    [VOCAB],
    [-1],
    [1, True],
    [1, np.True_],
    [1, 2.0],
    [1, None],
    [2**31],
    [2**63],
    [[1]],
    "text without a tokenizer",
    b"bytes",
    None,
    5,
    {"prompt": 1},
    {1, 2},
    iter([1]),
    np.array([1.5]),
    np.array([True]),
    np.array(3),
    np.zeros((2, 2), dtype=int),
    torch.tensor([0.5]),
    range(HUGE),
    [1] * 256,
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_bad_sampling_parameters_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name if not name.startswith("stop") else "stop"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_good_sampling_parameters_are_normalised() -> None:
    params = SamplingParams(top_k=np.int64(5), temperature=1, stop="a", stop_token_ids=[np.int32(3)], max_tokens=None)  # type: ignore[arg-type]
    assert (params.top_k, params.temperature, params.stop, params.stop_token_ids) == (5, 1.0, ("a",), (3,))
    assert SamplingParams(top_k=0).top_k == -1 and SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy and hash(params) == hash(params)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: type(prompt).__name__ + str(prompt)[:12])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    llm = fake_llm()
    good = llm.add_request([1, 2], greedy(5))
    with pytest.raises(RequestError):
        llm.add_request(prompt)
    with pytest.raises(RequestError, match="prompt 1"):
        llm.generate([[1], prompt], greedy(5))
    assert llm.stats().num_waiting == 1
    while llm.has_unfinished:
        for output in llm.step():
            assert (output.request_id, list(output.token_ids)) == (good, expected([1, 2], greedy(5)))
    check_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": {"max_tokens": 3}},
        {"request_id": ""},
        {"request_id": 7},
        {"request_id": "x" * 257},
        {"cache_salt": ""},
        {"cache_salt": 3},
        {"skip_prefix_cache_reads": 1},
        {"sampling_params": SamplingParams(stop="a")},
    ],
    ids=str,
)
def test_bad_request_options_are_refused(options: dict[str, Any]) -> None:
    llm = fake_llm()
    with pytest.raises(RequestError):
        llm.add_request([1, 2], **options)
    check_idle(llm)


def test_errors_name_the_request_the_value_and_the_remedy() -> None:
    llm = fake_llm(FakeRunner(5))
    with pytest.raises(RequestError, match=r"request mine: .*token ids must be from 0 to 96, got 97") as caught:
        llm.add_request([97], request_id="mine")
    assert caught.value.request_id == "mine"
    with pytest.raises(RequestError, match="a prompt of 16 tokens needs 5 blocks and the KV cache has 4; shorten"):
        llm.add_request(list(range(16)))
    assert len(llm.generate(list(range(16)), greedy(1))[0].token_ids) == 1
    assert len(llm.generate(list(range(15)), greedy(2))[0].token_ids) == 2


def test_placeholders_of_other_inputs_are_refused() -> None:
    llm = fake_llm(FakeRunner(tokenizer=FakeTokenizer(), placeholder_tokens={7: "an image", 65: "sound"}))
    with pytest.raises(RequestError, match=r"request mine: .*token 7 at index 2, which stands for an image; leave it"):
        llm.add_request([1, 2, 7, 7], request_id="mine")
    with pytest.raises(RequestError, match=r"prompt 1: .*token 65 at index 3, which stands for sound"):
        llm.stream([[1], "aaaA"])
    check_idle(llm)
    assert list(llm.generate([6, 8], greedy(3))[0].token_ids) == expected([6, 8], greedy(3))


def test_prompts_are_measured_by_what_their_windows_need() -> None:
    llm = fake_llm(FakeRunner(6, [KVGroup(4, 8)]), max_num_batched_tokens=100)
    output = llm.generate(list(range(60)), greedy(30))[0]
    assert list(output.token_ids) == expected(list(range(60)), greedy(30))
    chunks = [item for step in llm.runner.steps for item in step.scheduled if not item.samples]  # type: ignore[attr-defined]
    assert len(chunks) > 2, "the prompt must have been cut to fit"


def test_long_text_is_refused_before_it_is_tokenised() -> None:
    class Never(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            raise AssertionError

    llm = fake_llm(FakeRunner(tokenizer=Never()))
    with pytest.raises(RequestError, match="characters"):
        llm.add_request("x" * (255 * 128 + 1))


def test_waiting_requests_can_be_limited() -> None:
    llm = fake_llm(max_waiting=3)
    llm.add_request([1], greedy(2, n=2))
    with pytest.raises(RequestError, match="max_waiting"):
        llm.add_request([1], greedy(2, n=2))
    llm.add_request([1], greedy(2))
    with pytest.raises(RequestError, match=r"n must be at most 3 \(max_waiting\), got 4; raise max_waiting"):
        llm.add_request([1], greedy(2, n=4))
    while llm.has_unfinished:
        llm.step()
    assert len(llm.generate([[1]] * 9, greedy(2))) == 9 and len(list(llm.stream([[1]] * 9, greedy(1)))) == 9


def test_huge_values_are_refused_quickly_and_in_little_memory() -> None:
    llm = fake_llm()
    tracemalloc.start()
    started = time.perf_counter()
    for _ in range(20):
        for name in ("n", "max_tokens", "logprobs", "min_tokens"):
            with pytest.raises(RequestError):
                SamplingParams(**{name: HUGE})  # type: ignore[arg-type]
        for values in ({"stop_token_ids": range(HUGE)}, {"seed": 1 << 100_000}):
            with pytest.raises(RequestError):
                SamplingParams(**values)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.add_request(range(HUGE))
    spent, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent / 140 < 0.005 and peak < 1 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 1.5),
        ("block_size", True),
        ("num_kv_blocks", 1),
        ("max_model_len", 1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("max_prefill_share", 0.0),
        ("enforce_eager", 1),
        ("dtype", "float31"),
        ("load_format", "pickle"),
        ("seed", -1),
        ("max_waiting", 0),
        ("tensor_parallel_size", 0),
        ("step_timeout", 0),
        ("step_timeout", "long"),
        ("start_timeout", 0),
        ("chat_template_timeout", -1.0),
        ("chat_template_memory", 1 << 20),
        ("heartbeat_timeout", 0.5),
        ("heartbeat_timeout", True),
        ("heartbeat_timeout", float("nan")),
    ],
)
def test_bad_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig.from_options("model", {name: value})
    assert caught.value.param == name


def test_settings_are_normalised() -> None:
    config = EngineConfig.from_options("model", {"dtype": torch.bfloat16, "device": torch.device("cpu")})
    assert (config.dtype, config.device, config.model) == ("bfloat16", "cpu", "model")
    with pytest.raises(InvalidInputError):
        EngineConfig(model=3)  # type: ignore[arg-type]
