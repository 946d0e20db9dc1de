"""What the example server refuses, and what it says of an engine that fails: typed errors of OpenAI's client."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from fake_runner import FakeRunner, fake_llm
from invariants import check_idle
from openai_serving import MAX_WAITING, NAME, SpellingTokenizer, connect, fetch, openai, openai_server, serve, small_llm

from pagedattn.engine import LLM, SchedulerOutput
from pagedattn.errors import EngineDeadError

QUESTION: list[Any] = [{"role": "user", "content": "What is a block table?"}]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature must be a finite number from 0 to 1e+06, got -1"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
    ({"n": 0}, "n must be an integer from 1 to 128"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"presence_penalty": 3}, "presence_penalty must be a finite number from -2 to 2, got 3"),
    ({"stop": ["x"] * 17}, "stop must be a string or at most 16"),
    ({"logprobs": 21}, "logprobs must be an integer from 0 to 20"),
    ({"prompt": ""}, "prompt must have 1 to 2047 tokens"),
    ({"prompt": [1, 2, 3] * 700}, "prompt must have 1 to 2047 tokens"),
    ({"prompt": [512]}, "token ids must be from 0 to 511, got 512"),
    ({"prompt": ["fine", 5]}, "prompt 1: prompt must be text or a sequence of token ids, got int"),
    ({"prompt": None}, "prompt must be text, token ids, or a list of either"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
    *[({name: value}, f"{name} is not supported") for name, value in (("echo", True), ("best_of", 2), ("suffix", "x"))],
    *[({name: 0}, f"{name} is not supported") for name in ("temprature", "logit_bias")],
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages must be a list of messages"),
    ({"messages": [{"content": "x"}]}, "role must be one of system, developer, user, assistant, got None"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "role must be one of system, developer, user, assistant, got"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "role must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type text, got 'image_url'"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls is not supported"),
    ({"tools": [{"type": "function"}]}, "tools is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
    ({"logprobs": 3}, "logprobs must be true or false"),
    ({"max_completion_tokens": 0}, "max_tokens must be an integer from 1"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return small_llm()


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with serve(llm) as url, connect(url) as client:
        yield client
    check_idle(llm)


def test_what_cannot_be_done_is_refused(llm: LLM, client: openai.OpenAI) -> None:
    before = llm.stats().counters.generated_tokens
    chat = {"messages": QUESTION}
    for path, valid, cases in (("completions", {"prompt": "x"}, BAD), ("chat/completions", chat, BAD_CHAT)):
        for stream in (False, True):
            for fields, message in cases:
                body = {"model": NAME, "stream": stream, **valid, **fields}
                if stream and fields.keys() == {"stream_options"}:
                    continue
                with pytest.raises(openai.BadRequestError) as caught:
                    client.post(f"/{path}", body=body, cast_to=object)
                assert message in caught.value.message, caught.value.message
                assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "invalid_request_error"
    assert llm.stats().counters.generated_tokens == before
    nothing = {"echo": False, "suffix": None, "logit_bias": {}}
    assert client.completions.create(model=NAME, prompt="The", **nothing).choices[0].text


def test_placeholders_of_images_are_refused() -> None:
    llm = fake_llm(FakeRunner(tokenizer=SpellingTokenizer(), placeholder_tokens={7: "an image"}))
    with serve(llm) as url, connect(url) as client:
        for prompt in ([1, 7], [[1], [1, 7]]):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="token 7 at index 1, which stands for an image"):
                    client.completions.create(model=NAME, prompt=prompt, stream=stream)
        assert client.completions.create(model=NAME, prompt=[1, 6], max_tokens=3).choices[0].finish_reason == "length"
    check_idle(llm)


def test_unknown_models_and_paths_full_queues_and_no_json(
    llm: LLM, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny-qwen3', got 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model=NAME, input="x")
    with pytest.raises(openai.BadRequestError, match=rf"n must be at most {MAX_WAITING} \(max_waiting\)"):
        client.completions.create(model=NAME, prompt="x", n=MAX_WAITING + 1)
    with monkeypatch.context() as full:
        full.setattr(llm._scheduler, "waiting", dict.fromkeys(range(MAX_WAITING)))
        with pytest.raises(openai.RateLimitError, match="max_waiting"):
            client.completions.create(model=NAME, prompt="x")
    with pytest.raises(openai.BadRequestError, match="the body must be a JSON object"):
        client.post("/completions", body=["x"], cast_to=object)


def test_a_failing_and_a_dead_engine() -> None:
    runner = FakeRunner(tokenizer=SpellingTokenizer())
    llm = fake_llm(runner)

    def fail(step: SchedulerOutput) -> None:
        if step.scheduled[0].request.num_generated == 5:
            raise errors.pop()

    runner.before = fail
    with serve(llm) as url, connect(url) as client:
        errors: list[Exception] = [ZeroDivisionError("a defect"), MemoryError("no room")]
        for status in (503, 500):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=NAME, prompt="abc")
            assert caught.value.status_code == status
            # Else the client may send its next request over a connection that the server is about to close.
            assert caught.value.response.headers.get("connection") == ("close" if status == 500 else None)
        assert client.completions.create(model=NAME, prompt="abc", max_tokens=3).choices[0].finish_reason == "length"
        errors.append(EngineDeadError("the device is gone"))
        chunks = client.completions.create(model=NAME, prompt="abc", stream=True)
        assert [next(chunks).choices[0].finish_reason for _ in range(5)] == [None] * 5
        with pytest.raises(openai.APIError, match="the device is gone"):
            next(chunks)
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.completions.create(model=NAME, prompt="abc")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fetch(f"{url}/health")


def test_ctrl_c_ends_long_answers_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "SECONDS_TO_END", 0.3)
    runner = FakeRunner(tokenizer=SpellingTokenizer())
    runner.before = lambda step: time.sleep(0.02)
    llm = fake_llm(runner)
    with serve(llm) as url:
        client = connect(url)
        chunks = client.completions.create(model=NAME, prompt="abc", max_tokens=200, stream=True)
        next(chunks)
    with pytest.raises(openai.APIError, match="closed"):
        list(chunks)
    client.close()
    check_idle(llm)
