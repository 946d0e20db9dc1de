"""The engine over formats with a window of recent tokens: its tokens are those of `generate`, whatever happens."""

from __future__ import annotations

import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covers import values
from random_work import everything
from test_int4 import COVER, GREEDY, NEW_TOKENS, Axes, prompts, tokens
from test_int4 import make as make_int4
from tiny_models import hf_model, save

from pagedattn import plan_step
from pagedattn.cli import command as cli
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.worker import decode_graphs, kv_memory
from pagedattn.integrations import transformers as hf

SIZE, WINDOW = 16, "turboquant_k4v3:window=20"  # of two blocks
OTHERS = ("turboquant3:window=1", "int8:window=16", "k8v4:window=40", "int4:window=32", f"{WINDOW}:skip=-1")
FIRST = ("turboquant4:window=20:first=4", "turboquant3:first=17", "int4:first=1:skip=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path_factory.mktemp("qwen3"))


@cache
def _alone(name: str, index: int) -> list[int]:
    model = hf_model("qwen3", torch.float64, num_hidden_layers=2)
    hf.enable(model, kv_cache_dtype=name, block_size=_block_size(name))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    prompt = prompts()[index]
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def alone(name: str) -> list[list[int]]:
    """What `generate` of transformers gives over a format, a prompt at a time."""
    return [_alone(name, index) for index in range(len(prompts()))]


def _block_size(name: str) -> int | None:
    return None if name.startswith("int4") else SIZE


def make(folder: Path, **options: Any) -> LLM:
    name = options.pop("kv_cache_dtype", WINDOW)
    return make_int4(folder, kv_cache_dtype=name, block_size=_block_size(name), **options)


@pytest.mark.cover(by=lambda axes: values(pool=axes.pool, prefix=axes.prefix, model=axes.model))  # others: test_int4.py
@pytest.mark.parametrize("axes", COVER, ids=str)
def test_pairs_of_axes(axes: Axes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if axes.pool == "few open":
        monkeypatch.setattr(kv_memory, "_most_recent", lambda *_: 11)
    llm = make(folder, **axes.options(14))
    assert llm._scheduler.max_num_seqs == min(axes.batch, 3 if axes.pool == "few open" else 5)
    for _ in range(2 if axes.prefix == "hot" else 1):
        assert tokens(llm) == alone(WINDOW)
    counters = llm.stats().counters
    if axes.pool in ("recompute", "swap") and axes.batch == 5 and axes.chunk != 1:
        swaps = axes.pool == "swap" and axes.prefix != "off"
        assert counters.preemptions > 0 and (counters.swapped_in_blocks > 0) == swaps
    if axes.pool in ("ample", "few open"):
        assert counters.preemptions == 0
    assert counters.cached_tokens > 0 or axes.prefix != "hot" or axes.pool == "few open"
    assert counters.cached_tokens % SIZE == 0, "whole blocks"
    if axes.graphs and axes.model == "native":
        assert llm.runner._graphs.replays > 20


@pytest.mark.parametrize(
    ("name", "chunk"),
    [(name, chunk) for chunk in (7, 0) for name in (*OTHERS, *FIRST)]
    if everything
    else [(FIRST[-1], 7), (OTHERS[-1], 0)],
)
def test_formats_with_windows(name: str, chunk: int, folder: Path) -> None:
    """Of other block sizes and windows, or with a layer in the model's dtype, cold and hot."""
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_prefill_share": chunk / 32} if chunk else {}
    llm = make(folder, kv_cache_dtype=name, num_kv_blocks=14, max_num_seqs=4, **options)
    for _ in range(2):
        assert tokens(llm) == alone(name)
    assert llm.stats().counters.cached_tokens > 0


def test_windows_are_read_and_what_is_before_them_is_encoded(folder: Path) -> None:
    """What makes the other tests tests."""
    found = [_alone(name, 4) for name in ("auto", "turboquant4:window=0", WINDOW, "turboquant4:window=40")]
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_prefixes_are_found_at_every_position_of_a_block(folder: Path) -> None:
    """Of a prompt that others go on with, and of one whose end was generated, while it runs and once it has ended."""
    llm, fresh = make(folder), make(folder, enable_prefix_caching=False)
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first = prompts()[4]
    document = [*first, *llm.generate([first], GREEDY, progress=False)[0].outputs[0].token_ids]
    hits = []
    for shared in range(30, 30 + 2 * SIZE + 2, 3):
        asked = [*document[:shared], *prompts()[0]]
        before = llm.stats().counters.cached_tokens
        found, expected = (
            [*one.generate([asked], short, progress=False)[0].outputs[0].token_ids] for one in (llm, fresh)
        )
        assert found == expected
        hits.append(llm.stats().counters.cached_tokens - before)
    assert hits == [shared // SIZE * SIZE for shared in range(30, 30 + 2 * SIZE + 2, 3)]
    stored = (len(document) - 1) // SIZE - 2
    before = llm.stats().counters.cached_tokens
    llm.generate([[*document, 5]], short, progress=False)
    assert llm.stats().counters.cached_tokens - before == stored * SIZE, "as far as blocks are encoded"


def test_completions_fork_the_window(folder: Path) -> None:
    sampled = partial(SamplingParams, temperature=1.0, max_tokens=34, ignore_eos=True)
    together = tokens(make(folder), sampled(seed=7, n=3))
    for index in range(3):
        single = tokens(make(folder, enable_prefix_caching=False), sampled(seed=7 + index))
        assert together[index::3] == single


@pytest.mark.parametrize("name", [WINDOW, f"{WINDOW}:skip=0"])
def test_captured_steps_encode_what_the_window_has_passed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where metadata have tensors of their own, as on a GPU."""

    def with_own_tensors(layers: Any, common: Any, into: Any = None, capture: bool = False) -> Any:
        return plan_step(layers, common, into, capture=into is None)

    eager = tokens(make(folder, kv_cache_dtype=name))
    monkeypatch.setattr(decode_graphs, "plan_step", with_own_tensors)
    monkeypatch.setattr("pagedattn.backends.op_backend.check_capture", lambda *_: None)
    llm = make(folder, kv_cache_dtype=name, graph_sizes=(1, 4, 5))
    assert tokens(llm) == eager and llm.runner._graphs.replays > 20


def test_the_second_cache_has_a_window_for_each_request(folder: Path) -> None:
    llm = make(folder, num_kv_blocks=None, max_num_seqs=4, max_num_batched_tokens=50)
    recent = llm.runner.cache.recent
    assert recent is not None and recent.num_blocks == 1 + 4 * 3 + 4
    assert [group.window_blocks for group in llm.runner.kv_groups] == [2, 2]


@pytest.mark.parametrize("kept", ["window=1000000", "window=40:first=1000000"])
def test_what_is_kept_beyond_the_longest_sequence_keeps_everything(kept: str, folder: Path) -> None:
    """The second cache has then a whole sequence for each request, whose last block may be full at its end."""
    options = {"num_kv_blocks": None, "max_num_seqs": 2, "max_num_batched_tokens": 48, "max_model_len": 8 * SIZE}
    llm, exact = (make(folder, kv_cache_dtype=name, **options) for name in (f"turboquant2:{kept}", "auto"))
    assert [group.full_recent_blocks for group in llm.runner.kv_groups] == [7, 7]
    assert llm.runner.kv_groups[-1].recent_blocks == 1 + 2 * 8 == llm.runner.num_kv_blocks
    assert tokens(llm) == tokens(exact)
    longest = prompts()[4], SamplingParams(temperature=0, max_tokens=8 * SIZE - len(prompts()[4]), ignore_eos=True)
    found = [one.generate(*longest, progress=False)[0].outputs[0].token_ids for one in (llm, llm, exact)]
    assert found[0] == found[1] == found[2]


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    model, text = str(Path(__file__).parents[2] / "examples" / "tiny-qwen3"), "A block table"
    params = SamplingParams(temperature=0, max_tokens=60)
    expected = LLM(model, device="cpu", kv_cache_dtype=WINDOW).generate(text, params, progress=False)[0].text
    options = ["--kv-cache-dtype", WINDOW, "--max-tokens", "60", "--device", "cpu"]
    assert cli.main(["generate", model, text, *options]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
