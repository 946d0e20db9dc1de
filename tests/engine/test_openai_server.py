"""The example server through OpenAI's own client, on loopback: answers, streams, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from invariants import check_idle
from openai_serving import EXAMPLES, NAME, connect, fetch, openai, openai_server, serve, small_llm, wait_for

from pagedattn.engine import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPTS = ["The scheduler decides", "Paged attention is a way", "Copy on write lets", "A block table"]
QUESTION: list[Any] = [{"role": "user", "content": "What is a block table?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


class Served(NamedTuple):
    """A running server, and what its model says when it is asked directly."""

    llm: LLM
    url: str
    client: openai.OpenAI
    direct: dict[str, RequestOutput]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    llm = small_llm()
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    direct = {output.prompt or "": output for output in llm.generate(PROMPTS, params)}
    direct["chat"] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=None, logprobs=2))
    assert llm.reset_prefix_cache()
    with serve(llm) as url, connect(url) as client:
        yield Served(llm, url, client, direct)
    check_idle(llm)


def spelled(llm: LLM, output: RequestOutput) -> list[str]:
    tokenizer: Any = llm.runner.tokenizer
    return [tokenizer.decode([token], skip_special_tokens=False) for token in output.token_ids]


def test_a_completion_is_what_generate_gives(served: Served) -> None:
    for prompt in (PROMPTS[0], list(served.direct[PROMPTS[0]].prompt_token_ids)):
        answer = served.client.completions.create(model=NAME, prompt=prompt, logprobs=2, user="me", **GREEDY)
        choice, truth = answer.choices[0], served.direct[PROMPTS[0]]
        assert answer.object == "text_completion" and answer.model == NAME and answer.id.startswith("cmpl-")
        assert (choice.text, choice.finish_reason) == (truth.text, truth.finish_reason)
        assert answer.usage is not None and choice.logprobs is not None
        counts = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
        assert counts == (len(truth.prompt_token_ids), 24, len(truth.prompt_token_ids) + 24)
        assert choice.logprobs.tokens == spelled(served.llm, truth)
        assert choice.logprobs.token_logprobs == pytest.approx(truth.outputs[0].logprobs, abs=1e-4)
        words = choice.logprobs.tokens
        assert choice.logprobs.text_offset == [len("".join(words[:at])) for at in range(24)]
        tops = truth.outputs[0].top_logprobs
        assert choice.logprobs.top_logprobs is not None and tops is not None
        for row, top in zip(choice.logprobs.top_logprobs, tops, strict=True):
            assert list(row.values()) == pytest.approx(sorted(top.values()), abs=1e-3) and len(row) == 2


def test_streamed_offsets_are_those_of_the_whole(served: Served) -> None:
    given: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[:2], "n": 2, "logprobs": 0, **GREEDY}
    whole = served.client.completions.create(**given)
    offsets: list[list[int]] = [[], [], [], []]
    for chunk in served.client.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        if choice.logprobs is not None and choice.logprobs.text_offset is not None:
            offsets[choice.index] += choice.logprobs.text_offset
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs is not None]
    assert [len(one) for one in offsets] == [24] * 4


def test_parts_of_a_character_have_its_offset(served: Served) -> None:
    tokenizer: Any = served.llm.runner.tokenizer
    ids = tokenizer.encode("a\u2192b")
    assert len(ids) == 5
    offsets = openai_server.protocol.TextOffsets(served.llm.runner.make_detokenizer())
    assert offsets.push(ids[:3]) + offsets.push(ids[3:]) == [0, 1, 1, 1, 2]


def test_many_prompts_and_completions_in_one_request(served: Served) -> None:
    answer = served.client.completions.create(model=NAME, prompt=PROMPTS, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert [choice.text for choice in answer.choices] == [
        served.direct[prompt].text for prompt in PROMPTS for _ in "ab"
    ]
    stream = served.client.completions.create(model=NAME, prompt=PROMPTS, n=2, stream=True, **GREEDY)
    texts = [""] * 8
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_chat(served: Served) -> None:
    assert served.llm.reset_prefix_cache()
    truth = served.direct["chat"]
    parts = [{"type": "text", "text": "What is a "}, {"type": "text", "text": "block table?"}]
    in_parts: list[Any] = [{"role": "user", "content": parts}]
    for messages in (QUESTION, in_parts):
        answer = served.client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, logprobs=True, top_logprobs=2
        )
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", truth.text)
        assert answer.object == "chat.completion" and choice.finish_reason == "stop" == truth.finish_reason
        assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
        assert [token.token for token in choice.logprobs.content] == spelled(served.llm, truth)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert answer.usage.completion_tokens == len(truth.token_ids)
        details = answer.usage.prompt_tokens_details
        assert details is not None and details.cached_tokens == (16 if messages is in_parts else 0)
    short = served.client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0, max_completion_tokens=3, n=2
    )
    assert [choice.finish_reason for choice in short.choices] == ["length", "length"]


def test_a_streamed_chat_joins_to_the_whole(served: Served) -> None:
    truth = served.direct["chat"]
    first, *chunks, last, counted = served.client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        temperature=0,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert first.object == "chat.completion.chunk" and first.choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == truth.text and sum(map(bool, pieces)) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    assert last.choices[0].finish_reason == "stop" and {chunk.id for chunk in chunks} == {first.id}
    logprobs = [chunk.choices[0].logprobs for chunk in (*chunks, last)]
    tokens = [token for some in logprobs if some and some.content for token in some.content]
    assert [token.token for token in tokens] == spelled(served.llm, truth)
    assert not counted.choices and counted.usage is not None
    assert counted.usage.completion_tokens == len(truth.token_ids)


def test_sampling_and_stop_strings(served: Served) -> None:
    def sample(**options: Any) -> list[str]:
        answer = served.client.completions.create(model=NAME, prompt="A block", temperature=8.0, n=3, **options)
        return [choice.text for choice in answer.choices]

    assert sample(seed=5) == sample(seed=5) != sample(seed=6)
    assert sample(extra_body={"top_k": 1}) == sample(top_p=1e-9) and len(set(sample(top_p=1e-9))) == 1
    truth = served.direct[PROMPTS[0]].text
    stop = truth[12:15]
    for stream in (False, True):
        options: dict[str, Any] = {**GREEDY, "stop": ["never said", stop], "stream": stream}
        answer = served.client.completions.create(model=NAME, prompt=PROMPTS[0], **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == truth[: truth.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_concurrent_streams_share_steps(served: Served) -> None:
    before = served.llm.stats().counters

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=NAME, prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        plain = openai.DefaultAsyncHttpxClient(trust_env=False)
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "http_client": plain}
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", **options) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))

    assert asyncio.run(main()) == [served.direct[prompt].text for prompt in PROMPTS * 3]
    after = served.llm.stats().counters
    assert after.generated_tokens - before.generated_tokens == 12 * 24 > 2 * (after.steps - before.steps)


@pytest.mark.parametrize("stream", [True, False])
def test_who_disconnects_aborts_its_request(served: Served, stream: bool) -> None:
    llm, before = served.llm, served.llm.stats().counters.generated_tokens
    if stream:
        with closing(served.client.completions.create(model=NAME, prompt="The", n=2, stream=True, **ENDLESS)) as chunks:
            assert [next(chunks).object for _ in range(4)] == ["text_completion"] * 4
            assert llm.stats().num_running == 2
    else:
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.5).completions.create(model=NAME, prompt=PROMPTS, **ENDLESS)
    wait_for(lambda: not llm.has_unfinished)
    wait_for(lambda: llm.stats().num_free_blocks == llm.stats().num_blocks)
    check_idle(llm)
    assert 0 < llm.stats().counters.generated_tokens - before < 1900


def test_models_health_and_metrics(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [NAME]
    assert fetch(f"{served.url}/health") == "ok\n"
    metrics = dict(line.split() for line in fetch(f"{served.url}/metrics").splitlines())
    assert metrics["pagedattn_num_running"] == "0" and int(metrics["pagedattn_num_blocks"]) == 1199
    assert int(metrics["pagedattn_counters_generated_tokens"]) == served.llm.stats().counters.generated_tokens


def test_events_are_as_the_protocol_has_them(served: Served) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "stream": True, **GREEDY}
    *events, end = fetch(f"{served.url}/v1/completions", body).removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]" and len(events) > 10 and all(event.startswith("data: {") for event in events)


def test_the_client_of_the_quickstart(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (snippet,) = re.findall(
        r"```py\n(.*?)```", (ROOT / "docs" / "quickstart_engine.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert snippet.count("http://127.0.0.1:8000/v1") == 1
    exec(compile(snippet.replace("http://127.0.0.1:8000", served.url), "quickstart_engine.md", "exec"), {})
    assert served.direct["chat"].text in capsys.readouterr().out


@pytest.mark.parametrize(("words", "name"), [([], "tiny-qwen3"), (["--name", "mine"], "mine")], ids=["folder", "given"])
def test_the_name_of_the_model(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []
    monkeypatch.setattr(openai_server.Listener, "run", lambda self, socks: served.append(self.server))
    argv = ["openai_server.py", str(EXAMPLES / "tiny-qwen3"), "--port", "0", "--set", "num_kv_blocks=64", *words]
    monkeypatch.setattr(sys, "argv", argv)
    openai_server.main()
    (server,) = served
    assert capsys.readouterr().out.startswith(f"{name} at http://127.0.0.1:")
    assert [one["id"] for one in asyncio.run(server.models())["data"]] == [name]


def test_the_command_takes_a_free_port_and_ends_by_ctrl_c() -> None:
    script = EXAMPLES / "openai_server.py"
    start = "import runpy, sys; sys.path.insert(0, sys.argv[1]);"
    run = "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [str(EXAMPLES), str(script), str(EXAMPLES / "tiny-qwen3"), "--port", "0", "--set", "num_kv_blocks=64"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", f"{start} {run}", *words], **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"tiny-qwen3 at (http://127.0.0.1:\d+)/v1\n", line)
            assert match, line
            assert "pagedattn_num_blocks 63\n" in fetch(f"{match[1]}/metrics")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in said, said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere"),
        ([str(EXAMPLES / "tiny-qwen3"), "--set", "max_seqs=3"], "did you mean max_num_seqs"),
        ([str(EXAMPLES / "tiny-qwen3"), "--host", "256.0.0.1"], "openai_server.py: "),
    ],
)
def test_a_server_that_cannot_start_says_why(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["openai_server.py", *words, "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        openai_server.main()
    said = capsys.readouterr().err
    assert caught.value.code == 1 and message in said and said.count("\n") == 1
