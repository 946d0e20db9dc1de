"""Token counts against a recount, whatever happened to requests and rows, and the scores that follow from them."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_work import part_of
from test_runner import Driver, make_runner
from tiny_models import hf_model, save

from pagedattn.engine import LLM, Request, SamplingParams
from pagedattn.engine.sampling import token_counts
from pagedattn.engine.sampling.metadata import SamplingMetadataBuilder, has_penalty
from pagedattn.engine.sampling.packed_params import PARAMS, request_params
from pagedattn.engine.sampling.rows import SampledRows
from pagedattn.engine.sampling.token_counts import TokenCounts
from pagedattn.engine.scheduler_output import PLACEHOLDER_TOKEN
from pagedattn.errors import PagedAttnError
from pagedattn.testing import interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, NUM_ROWS = 37, 6
ALL: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.45}
KINDS: list[dict[str, Any]] = [
    *({name: value} for name, value in ALL.items()),
    *(ALL, {}, {"repetition_penalty": 0.6, "presence_penalty": -0.9}),
]


@pytest.fixture(params=["torch", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel" and not interpreted() and DEVICE.type == "cpu":
        pytest.skip("kernels need a GPU or the interpreter")
    monkeypatch.setattr(token_counts, "fuses", lambda x: request.param == "kernel")
    return request.param


class Counted:
    """Both halves: what the host knows of the rows, and their counts on the device."""

    def __init__(self, vocab: int = VOCAB, num_rows: int = NUM_ROWS) -> None:
        self.builder, self.device = SamplingMetadataBuilder(num_rows), TokenCounts(num_rows, vocab, DEVICE)
        self.sends = 0

    @property
    def counts(self) -> torch.Tensor:
        assert self.device.counts is not None
        return self.device.counts


def request(tokens: list[int], prompt_len: int | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**sampling)
    out = Request("r", array("i", tokens), params, arrival=0, max_total_tokens=999)
    out.prompt_len = len(tokens) if prompt_len is None else prompt_len
    return out


def penalize(
    counted: Counted, logits: torch.Tensor, requests: list[Request], rows: list[int], last: list[int]
) -> torch.Tensor:
    """Scores; `last` is what the device has of the requests' last tokens."""
    lengths = [len(one.token_ids) for one in requests]
    last_tokens, on_device, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (last, rows, lengths))
    params = torch.zeros(max(rows) + 1, PARAMS, dtype=torch.int32, device=DEVICE)
    params[rows] = torch.from_numpy(request_params(requests)).to(DEVICE)
    sampling = counted.builder.build(requests, np.array(rows, dtype=np.int32))
    counted.sends += any(map(len, sampling.counts))
    sampled = SampledRows(last_tokens, on_device, lens)
    return counted.device.penalize(logits.to(DEVICE), sampling, sampled, params).cpu()


def recount(tokens: list[int], prompt_len: int, vocab: int = VOCAB) -> list[int]:
    prompt, output = set(tokens[:prompt_len]), Counter(tokens[prompt_len:])
    return [2 * output[token] + (token in prompt) for token in range(vocab)]


def reference(logits: np.ndarray, tokens: list[int], prompt_len: int, sampling: SamplingParams) -> np.ndarray:
    """Scores of one row by the definitions, a token at a time, each operation rounded to float32."""
    out, output = logits.astype(np.float32), Counter(tokens[prompt_len:])
    repetition, presence, frequency = (
        np.float32(value)
        for value in (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    )
    for token in {*tokens}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        if output[token]:
            out[token] -= frequency * np.float32(output[token]) + presence
    return out


class History:
    """Requests in a few rows, as an engine has them; `truths` are their tokens, of which the host may miss the last."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.requests = [self.fresh() for _ in range(10)]
        self.rows: dict[Request, int] = {}
        self.happened: Counter[str] = Counter()
        self.drawn: list[Request] = []

    def fresh(self) -> Request:
        prompt = [self.draw.randrange(VOCAB) for _ in range(self.draw.randrange(1, 30))]
        return request(prompt, **self.draw.choice(KINDS))

    def chosen(self) -> list[Request]:
        """Requests of the next step, each in a row of its own; rows are taken from those that are not in it."""
        chosen = self.draw.sample(self.requests, self.draw.randrange(1, NUM_ROWS + 1))
        for one in [one for one in chosen if one not in self.rows]:
            free = {*range(NUM_ROWS)} - {*self.rows.values()}
            if not free:
                victim = self.draw.choice([other for other in self.rows if other not in chosen])
                free = {self.rows.pop(victim)}
                self.happened["lost"] += 1
            self.rows[one] = self.draw.choice([*free])
        return chosen

    def go_on(self, truths: dict[Request, list[int]]) -> None:
        """What the step before has drawn becomes known or not; requests end, and all may have to begin again."""
        for at, one in enumerate(self.requests):
            again = self.draw.random() < 0.02
            if again or self.draw.random() < 0.04:
                self.requests[at] = one if again else self.fresh()
                self.happened["again" if again else "ended"] += 1
                self.rows.pop(one, None)
        begin_again = self.draw.random() < 0.03
        for one in self.requests:
            ids = one.token_ids
            if (
                ids[-1] == PLACEHOLDER_TOKEN and begin_again
            ):  # its tokens are as the host has them, and the last is drawn again
                self.happened["drawn again"] += 1
                ids.pop()
                truths[one].pop()
            elif ids[-1] == PLACEHOLDER_TOKEN and (one not in self.drawn or self.draw.random() < 0.4):
                ids[-1] = truths[one][-1]


@pytest.mark.parametrize("seed", range(part_of(3, 3)))
def test_counts_and_scores_are_those_of_a_recount_whatever_happened(seed: int, path: str) -> None:
    history, counts = History(seed), Counted()
    draw, happened = history.draw, history.happened
    truths: dict[Request, list[int]] = {}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(400):
        chosen = history.chosen()
        for one in chosen:
            truths.setdefault(one, one.token_ids.tolist())
        before, rows, last = counts.sends, [history.rows[one] for one in chosen], [truths[one][-1] for one in chosen]
        logits = torch.randn(len(chosen), VOCAB, generator=generator) * 3
        scores = penalize(counts, logits, chosen, rows, last)
        happened["unread"] += sum(one.token_ids[-1] == PLACEHOLDER_TOKEN for one in chosen)
        happened["silent"] += counts.sends == before
        for at, (one, row) in enumerate(zip(chosen, rows, strict=True)):
            wanted = reference(logits[at].numpy(), truths[one], one.prompt_len, one.sampling)
            assert np.array_equal(scores[at].numpy(), wanted)
            if has_penalty(one.sampling):
                assert counts.counts[row].tolist() == recount(truths[one], one.prompt_len)
        history.drawn = chosen if draw.random() > 0.1 else []  # else the step is run again
        happened["run again"] += not history.drawn
        for one in history.drawn:
            if one.token_ids[-1] == PLACEHOLDER_TOKEN:
                one.token_ids[-1] = truths[one][-1]
            truths[one].append(draw.randrange(VOCAB))
            one.token_ids.append(PLACEHOLDER_TOKEN)
        history.go_on(truths)
        if draw.random() < 0.02:
            counts.builder.forget()
            happened["forgotten"] += 1
    assert min(happened[what] for what in ("lost", "ended", "again", "drawn again", "forgotten")) > 2
    assert happened["unread"] > 150 and happened["run again"] > 10 and happened["silent"] > 10


def test_a_request_that_only_decodes_sends_nothing(path: str) -> None:
    counts, found = Counted(), []
    one, other = request([1, 2, 2], **ALL), request([5])
    truth = one.token_ids.tolist()
    for step in range(12):
        penalize(counts, torch.zeros(2, VOCAB), [one, other], [2, 4], [truth[-1], 5])
        found.append(counts.sends)
        one.token_ids[-1] = truth[-1]
        truth.append(step % 3)
        one.token_ids.append(PLACEHOLDER_TOKEN)
        other.token_ids.append(7)
    assert found == [1] * 12
    assert counts.counts[2].tolist() == recount(truth[:-1], 3)


def test_a_row_that_passes_to_a_request_without_penalties(path: str) -> None:
    """Its counts are still those of the request before, which is in another row now."""
    counts, logits = Counted(), torch.ones(2, VOCAB)
    one, other = request([1, 2, 3], **ALL), request([1, 2, 3])
    penalize(counts, logits[:1], [one], [0], [3])
    scores = penalize(counts, logits, [other, one], [0, 1], [3, 3])
    assert torch.equal(scores[0], logits[0])
    assert scores[1].argmin() == 1 and torch.equal(scores[1, 4:], logits[1, 4:])


def test_without_penalties_nothing_is_allocated_and_logits_stay() -> None:
    counts, logits = TokenCounts(NUM_ROWS, VOCAB, torch.device("cpu")), torch.ones(1, VOCAB, dtype=torch.float16)
    rows = SampledRows(*(zeros := torch.zeros(4, 1, dtype=torch.int32))[:3])
    sampling = SamplingMetadataBuilder(NUM_ROWS).build([request([1], logprobs=1)], np.zeros(1, dtype=np.int32))
    assert counts.penalize(logits, sampling, rows, zeros) is logits and counts.counts is None


def test_a_token_that_nobody_has_read_is_not_counted_by_the_host(path: str) -> None:
    one = request([1, 2, PLACEHOLDER_TOKEN, 3], 2, **ALL)
    with pytest.raises(PagedAttnError, match="not known yet"):
        penalize(Counted(), torch.zeros(1, VOCAB), [one], [0], [3])


@pytest.mark.skipif(not interpreted() and DEVICE.type == "cpu", reason="kernels need a GPU or the interpreter")
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    # The interpreter computes bfloat16 wrongly.
    [(5, torch.float32), (4096, torch.float16), (9000, torch.float32)]
    + [(9000, torch.bfloat16)] * torch.cuda.is_available(),
    ids=str,
)
def test_the_kernel_gives_the_scores_of_the_torch_path(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, over several steps, of rows of logits that lie apart; the logits stay as they are."""
    draw, generator, found = random.Random(vocab), torch.Generator().manual_seed(vocab), []
    history = [[draw.choice([0, vocab - 1, draw.randrange(vocab)]) for _ in range(60)] for _ in KINDS]
    logits = torch.randn(4, len(KINDS), vocab + 3, generator=generator).mul(4).to(dtype)
    logits[0, :, :4] = torch.tensor([0.0, -0.0, -torch.inf, torch.inf])
    rows = draw.sample(range(9), len(KINDS))
    for kernel in (False, True):
        monkeypatch.setattr(token_counts, "fuses", lambda x, kernel=kernel: kernel)
        counts, scores = Counted(vocab, 9), []
        requests = [request(tokens[:50], 30, **kind) for tokens, kind in zip(history, KINDS, strict=True)]
        for step in range(4):
            given = logits[step].to(DEVICE)
            last = [tokens[49 + step] for tokens in history]
            scores.append(penalize(counts, given[:, :vocab], requests, rows, last))
            assert torch.equal(given.cpu(), logits[step])
            for one, tokens in zip(requests, history, strict=True):
                one.token_ids.append(tokens[50 + step])
        found.append((torch.stack(scores), counts.counts.cpu()))
    (plain, counted), (scores, by_kernel) = found
    assert torch.equal(scores, plain) and torch.equal(by_kernel, counted) and scores.dtype == torch.float32
    plain_row = next(at for at, kind in enumerate(KINDS) if not kind)
    assert torch.equal(scores[:, plain_row], logits[:, plain_row, :vocab].float())
    assert (scores != logits[:, :, :vocab].float()).any(-1).all(0).tolist() == [bool(kind) for kind in KINDS]


@pytest.fixture(scope="module")
def reference_model() -> Any:
    return hf_model("qwen3", torch.float64)


@pytest.fixture(scope="module")
def folder(reference_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model, tmp_path_factory.mktemp("model"))


PROMPTS = [[5, 9, 200, 17], list(range(40, 77)), [11], [400, 401] * 10]


@pytest.mark.parametrize(
    ("overlap", "preemption"),
    [
        (False, "recompute"),
        (True, "swap"),
        pytest.param(False, "swap", marks=pytest.mark.grid),
        pytest.param(True, "recompute", marks=pytest.mark.grid),
    ],
)
def test_tokens_are_those_of_transformers(
    overlap: bool, preemption: str, path: str, reference_model: Any, folder: Path
) -> None:
    """Chunked prompts, forks, preemptions, and rows that pass from one request to another."""
    if path == "kernel" and not interpreted():
        pytest.skip("a model on the CPU needs the interpreter")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "block_size": 4, "max_num_batched_tokens": 16}
    llm = LLM(str(folder), num_kv_blocks=34, max_num_seqs=4, overlap=overlap, preemption=preemption, **options)
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=30, n=2)
    outputs = llm.generate(PROMPTS, params)
    assert llm.stats().counters.preemptions > 2
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30, "repetition_penalty": 1.3}
        wanted = reference_model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]
        assert [list(one.token_ids) for one in output.outputs] == [wanted.tolist()] * 2


def test_a_failed_step_leaves_no_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it fails after it counted, nor where it is run again after it succeeded."""
    runner = make_runner(folder)
    driver = Driver(runner, **ALL)
    one = driver.request(list(range(3, 20)))
    driver.run([(one, 17)])
    driver.run([(one, 1)])
    step = driver.step([(one, 1)])
    wanted = runner.execute(step)
    assert runner.execute(step) == wanted

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="injected"):
        patch.setattr(runner._sampler, "_logprobs", fail)
        runner.execute(step)
    assert runner._builder._sampling._owners == [None] * (runner._state.num_rows + 1)
    assert runner.execute(step) == wanted
    assert runner._counts.counts is not None
    row = runner._state._row_of[one]
    assert runner._counts.counts[row].tolist() == recount(list(one.token_ids), 17, runner.vocab_size)
