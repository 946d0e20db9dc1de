"""One sequence's text: it ends before the earliest stop string, and a stream shows no part of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_runner import FakeRunner, FakeTokenizer, fake_llm, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.engine import LLM


class Scripted:
    """A detokenizer whose k-th token has the k-th of given texts, whatever its id."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(next(self._texts) for _ in token_ids)

    def flush(self) -> str:
        return ""


def scripted_llm(texts: Sequence[str]) -> LLM:
    runner = FakeRunner(tokenizer=FakeTokenizer())
    runner.make_detokenizer = lambda: Scripted(texts)  # type: ignore[assignment, return-value]
    return fake_llm(runner)


def cut_text(texts: Sequence[str], stops: Sequence[str], min_tokens: int) -> str:
    """By the definition: up to the first stop string that a token after the first `min_tokens - 1` completes."""
    for count in range(max(1, min_tokens), len(texts) + 1):
        text, before = "".join(texts[:count]), len("".join(texts[: count - 1]))
        new = {stop: range(max(0, before - len(stop) + 1), len(text)) for stop in stops}
        hits = [at for stop, starts in new.items() for at in starts if text.startswith(stop, at)]
        if hits:
            return text[: min(hits)]
    return "".join(texts)


@pytest.mark.parametrize(
    ("texts", "stops", "text"),
    [
        (["x", "abcd"], ["cd", "bc"], "xa"),
        (["x", "a", "b", "c"], ["c", "bc"], "xa"),
        (["x", "a", "ab"], ["b", "aab"], "x"),
        (["a", "a", "b", "c"], ["aab"], ""),
        (["a", "a", "a", "b", "c"], ["aab"], "a"),
        (["a", "b", "a", "b", "a", "c"], ["abac"], "ab"),
    ],
)
def test_text_ends_before_the_earliest_stop_string(texts: list[str], stops: list[str], text: str) -> None:
    """In whichever order they are listed, where one token completes several, and where they overlap themselves."""
    sampling = greedy(len(texts), stop=stops)
    assert scripted_llm(texts).generate("p", sampling)[0].text == text
    assert "".join(delta.text for delta in scripted_llm(texts).stream("p", sampling)) == text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", max_size=3), min_size=1, max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_deltas_are_the_text_and_that_is_by_the_definition(texts: list[str], stops: list[str], least: int) -> None:
    sampling = greedy(len(texts), stop=stops, min_tokens=min(least, len(texts)))
    text = cut_text(texts, stops, sampling.min_tokens)
    assert scripted_llm(texts).generate("p", sampling)[0].text == text
    deltas = list(scripted_llm(texts).stream("p", sampling))
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].completion is not None and deltas[-1].completion.text == text


def test_an_aborted_request_has_no_time_per_token() -> None:
    llm = fake_llm()
    name = llm.add_request([1, 2, 3], greedy(60))
    for _ in range(5):
        llm.step()
    llm.abort(name)
    (output,) = llm.step()
    assert output.finish_reason == "abort" and len(output.token_ids) == 5
    assert output.time_to_first_token is not None and output.time_per_token is None
