"""ModelRunner: steps of mixed prompts and decodes give the tokens of transformers, and a failed step leaves nothing."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from test_detokenizer import byte_level
from tiny_models import hf_model, save

from pagedattn.engine import Request, ScheduledRequest, SchedulerOutput
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.sampling_params import SamplingParams
from pagedattn.engine.worker.runner import ModelRunner
from pagedattn.errors import CapacityError, EngineDeadError, InvalidInputError, UnsupportedError, WeightsError

PROMPTS = [[5, 9, 200, 17, 3], list(range(40, 77)), [11], [400, 401] * 10]


@pytest.fixture(scope="module", params=["qwen3", "qwen2-half-window"])
def reference(request: pytest.FixtureRequest) -> Any:
    return hf_model(request.param, torch.float64)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("model"))


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(
        EngineConfig(**{"model": str(folder), "dtype": "float64", "device": "cpu", "num_kv_blocks": 96, **options})
    )


class Driver:
    """Requests with blocks handed out by hand."""

    def __init__(self, runner: ModelRunner, **sampling: Any) -> None:
        self.runner = runner
        self.sampling = SamplingParams(**{"temperature": 0.0, **sampling})
        self.next_block = 1

    def request(self, tokens: list[int]) -> Request:
        request = Request("r", array("i", tokens), self.sampling, arrival=0, max_total_tokens=512)
        request.block_ids = [[] for _ in self.runner.kv_groups]
        return request

    def item(self, request: Request, size: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        for table, group in zip(request.block_ids, self.runner.kv_groups, strict=True):
            while len(table) * group.block_size < start + size:
                table.append(self.next_block)
                self.next_block += 1
        return ScheduledRequest(request, start, size, start + size == len(request.token_ids))

    def step(self, sizes: list[tuple[Request, int]], copies: tuple[tuple[int, int], ...] = ()) -> SchedulerOutput:
        items = [self.item(request, size) for request, size in sizes]
        items.sort(key=lambda item: not (item.num_tokens == 1 and item.start > 0))
        decodes = sum(item.num_tokens == 1 and item.start > 0 for item in items)
        return SchedulerOutput(tuple(items), decodes, copies)

    def run(self, sizes: list[tuple[Request, int]]) -> None:
        self.commit(self.step(sizes))

    def commit(self, step: SchedulerOutput) -> None:
        for item, token in zip(step.scheduled, self.runner.execute(step), strict=True):
            item.request.num_computed_tokens += item.num_tokens
            assert (token is not None) == item.samples
            if token is not None:
                assert token.error is None
                item.request.token_ids.append(token.token_id)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out


@pytest.mark.parametrize("block_size", [4, 16])
def test_mixed_steps_give_the_tokens_of_transformers(block_size: int, reference: Any, folder: Path) -> None:
    driver = Driver(make_runner(folder, block_size=block_size, num_kv_blocks=160))
    one, two, three, four = map(driver.request, PROMPTS)
    driver.run([(one, 5), (two, 7)])
    driver.run([(two, 29), (one, 1), (three, 1)])
    driver.run([(two, 1), (three, 1), (four, 20), (one, 1)])
    for _ in range(12):
        driver.run([(request, 1) for request in (one, two, three, four)])
    for request, prompt in zip((one, two, three, four), PROMPTS, strict=True):
        assert request.num_generated >= 12
        assert list(request.token_ids) == greedy(reference, prompt, request.num_generated)


def test_a_failed_step_can_run_again_with_other_blocks(reference: Any, folder: Path) -> None:
    runner = make_runner(folder)
    driver = Driver(runner)
    request, other = driver.request(PROMPTS[1]), driver.request(PROMPTS[3])
    driver.run([(request, 20)])
    places = [f"layers.{index}.{part}" for index in range(4) for part in ("self_attn.o_proj", "mlp")]
    for place in [*places, "norm"]:
        held = [list(table) for table in request.block_ids]
        step = driver.step([(request, 1), (other, 20)])
        handle = runner.model.get_submodule(place).register_forward_pre_hook(_raiser(RuntimeError("injected")))
        with pytest.raises(RuntimeError, match="injected"):
            runner.execute(step)
        handle.remove()
        request.block_ids, other.block_ids = held, [[] for _ in runner.kv_groups]
    driver.commit(driver.step([(request, 17), (other, 20)]))
    for _ in range(4):
        driver.run([(request, 1), (other, 1)])
    assert list(request.token_ids) == greedy(reference, PROMPTS[1], 5)
    assert list(other.token_ids) == greedy(reference, PROMPTS[3], 5)


def test_device_faults_are_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    driver = Driver(runner)
    request = driver.request(PROMPTS[0])
    step = driver.step([(request, 5)])
    good = runner.execute(step)
    for raised, typed in (
        (torch.OutOfMemoryError("out"), CapacityError),
        (torch.AcceleratorError("dead"), EngineDeadError),
    ):
        with monkeypatch.context() as patch, pytest.raises(typed, match=str(raised)):
            patch.setattr(runner.model, "logits", _raiser(raised))
            runner.execute(step)
        assert runner.execute(step) == good


def _raiser(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_copies_run_first(reference: Any, folder: Path) -> None:
    driver = Driver(make_runner(folder))
    request = driver.request(PROMPTS[1])
    driver.run([(request, 37)])
    twin = driver.request(list(request.token_ids))
    twin.num_computed_tokens = 37
    twin.block_ids = [[80 + 10 * g + i for i in range(len(table))] for g, table in enumerate(request.block_ids)]
    pairs = [pair for a, b in zip(request.block_ids, twin.block_ids, strict=True) for pair in zip(a, b, strict=True)]
    assert len(pairs) >= 3
    driver.commit(driver.step([(twin, 1)], tuple(pairs)))
    assert list(twin.token_ids) == greedy(reference, PROMPTS[1], 2)


def test_nan_in_one_sequence_stays_there(folder: Path) -> None:
    runner = make_runner(folder)
    driver = Driver(runner)
    good, bad = driver.request(PROMPTS[0]), driver.request(PROMPTS[1])
    driver.run([(good, 5), (bad, 37)])
    for layer in range(runner.cache.num_layers):
        blocks = bad.block_ids[runner.cache.group_of(layer)]
        runner.cache.layer(layer).key[blocks] = float("nan")
    step = driver.step([(good, 1), (bad, 1)])
    first, second = runner.execute(step)
    assert first is not None
    assert second is not None
    assert (first.error, second.token_id) == (None, -1)
    assert second.error


def test_only_sampled_rows_reach_the_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder)
    driver = Driver(runner)
    seen: list[int] = []
    logits = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    one, two = driver.request(PROMPTS[1]), driver.request(PROMPTS[0])
    driver.run([(one, 30)])
    driver.run([(one, 7), (two, 4)])
    driver.run([(one, 1), (two, 1)])
    assert seen == [1, 2]


def test_an_empty_step(folder: Path) -> None:
    assert make_runner(folder).execute(SchedulerOutput((), 0, ())) == []


def test_what_the_engine_needs_to_know(folder: Path, tmp_path: Path) -> None:
    runner = make_runner(folder, max_model_len=100)
    assert (runner.vocab_size, runner.max_model_len, runner.num_kv_blocks) == (512, 100, 96)
    assert runner.eos_token_ids == (2,)
    assert runner.tokenizer is None
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        runner.make_detokenizer()
    assert [group.sliding_window for group in runner.kv_groups] in ([None], [None, 8])
    assert runner.cache.num_blocks == 96


def test_the_tokenizer_and_its_eos(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    assert make_runner(tmp_path).eos_token_ids == (2,)
    for name in ("config.json", "generation_config.json"):
        text = (tmp_path / name).read_text(encoding="utf-8").replace('"eos_token_id": 2', '"eos_token_id": null')
        (tmp_path / name).write_text(text, encoding="utf-8")
    runner = make_runner(tmp_path)
    assert runner.tokenizer is not None
    assert runner.eos_token_ids == (runner.tokenizer.control_tokens["<|im_end|>"],)
    assert runner.make_detokenizer().push(runner.tokenizer.encode("fox")) == "fox"


def test_bad_settings(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_position_embeddings"):
        make_runner(folder, max_model_len=513)
    with pytest.raises(InvalidInputError, match="device"):
        make_runner(folder, device="abacus")
    with pytest.raises(UnsupportedError, match="GPU"):
        make_runner(folder, device="cuda:99")
    with pytest.raises(WeightsError, match="folder"):
        make_runner(tmp_path / "nothing")


def test_dtype_auto_is_the_configs(folder: Path) -> None:
    assert make_runner(folder, dtype="auto").model.dtype == torch.float64
    assert make_runner(folder, dtype="float32").model.dtype == torch.float32
