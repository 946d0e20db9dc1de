"""Steps of decodes in buffers of fixed sizes: padding disturbs nobody, and larger batches run eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner import Driver, greedy, make_runner
from tiny_models import hf_model, save

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.decode_graphs import default_sizes
from pagedattn.errors import InvalidInputError

PROMPTS = [[5, 9, 200, 17, 3], list(range(40, 77)), [11], [400, 401] * 10, [7, 8, 9]]


@pytest.fixture(scope="module", params=["qwen3", "qwen2-half-window"])
def reference(request: pytest.FixtureRequest) -> Any:
    return hf_model(request.param, torch.float64)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("model"))


def test_padding_writes_nowhere_and_reads_nothing_of_others(reference: Any, folder: Path) -> None:
    runner = make_runner(folder, graph_sizes=(8, 2))
    driver, graphs = Driver(runner), runner._graphs
    assert graphs is not None
    requests = [driver.request(list(prompt)) for prompt in PROMPTS]
    driver.run([(one, len(one.token_ids)) for one in requests])
    runner._state.last_tokens[-1] = 1 << 30  # nobody's row
    before = runner.cache.slabs.clone()
    for step in range(10):
        driver.run([(one, 1) for one in requests[: 5 - step % 5]])
    held = sorted({block for one in requests for table in one.block_ids for block in table})
    free = [block for block in range(runner.num_kv_blocks) if block not in held]
    assert torch.equal(runner.cache.slabs[:, free], before[:, free]), "block 0 and free blocks are as they were"
    assert graphs.replays == 10
    for one, prompt in zip(requests, PROMPTS, strict=True):
        assert list(one.token_ids) == greedy(reference, prompt, one.num_generated)
    assert [one.num_generated for one in requests] == [11, 9, 7, 5, 3]


def test_padded_rows_are_nobodys(folder: Path) -> None:
    runner = make_runner(folder, graph_sizes=(4,))
    driver, graphs = Driver(runner), runner._graphs
    assert graphs is not None
    one, two = (driver.request(list(prompt)) for prompt in PROMPTS[:2])
    assert [common.block_size for common in graphs._steps[4].commons] == runner._state.block_sizes
    driver.run([(one, 5), (two, 37)])
    driver.run([(one, 1), (two, 1)])
    rows = [runner._state._row_of[each] for each in (one, two)]
    assert graphs._rows.state_rows.tolist() == [*rows, *[runner._state.num_rows] * 2]
    driver.run([(two, 1)])
    assert graphs._rows.state_rows.tolist() == [rows[1], *[runner._state.num_rows] * 3]
    assert graphs._rows.ids[1:].tolist() == graphs._rows.positions[1:].tolist() == [0] * 3


def test_larger_batches_and_mixed_steps_run_eagerly(folder: Path) -> None:
    runner = make_runner(folder, graph_sizes=(2,))
    driver, graphs = Driver(runner), runner._graphs
    assert graphs is not None
    one, two, three, four = (driver.request(list(prompt)) for prompt in PROMPTS[:4])
    driver.run([(one, 5), (two, 37), (three, 1)])
    driver.run([(one, 1), (two, 1), (three, 1)])
    driver.run([(one, 1), (four, 20)])
    assert graphs.replays == 0
    driver.run([(one, 1), (four, 1)])
    assert graphs.replays == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "seed": 5},
        {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_tokens": 6, "seed": 6},
        {"temperature": 0.0, "logprobs": 3},
    ],
    ids=str,
)
def test_sampling_is_that_of_eager_steps(sampling: dict[str, Any], folder: Path) -> None:
    outputs = []
    for sizes in (None, (1, 4)):
        llm = LLM(str(folder), device="cpu", dtype="float64", num_kv_blocks=96, graph_sizes=sizes)
        params = SamplingParams(max_tokens=14, **sampling)
        outputs.append([(out.token_ids, out.outputs[0].logprobs) for out in llm.generate(PROMPTS[:3], params)])
    assert outputs[0] == outputs[1]
    assert len({token for tokens, _ in outputs[0] for token in tokens}) > 10


def test_enforce_eager_captures_nothing(folder: Path) -> None:
    assert make_runner(folder, graph_sizes=(2,), enforce_eager=True)._graphs is None
    assert make_runner(folder)._graphs is None, "without a GPU a graph saves nothing"


def test_default_sizes() -> None:
    assert default_sizes(1) == [1] and default_sizes(3) == [1, 3] and default_sizes(20) == [1, 8, 16, 20]
    assert default_sizes(256)[-2:] == [248, 256] and default_sizes(9999)[-2:] == [496, 512]
    assert len(default_sizes(512)) == 1 + 32 + 16


@pytest.mark.parametrize("sizes", [(), (0,), (1.5,), 4, "8", (True,)])
def test_bad_sizes_are_refused(sizes: object, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="graph_sizes"):
        make_runner(folder, graph_sizes=sizes)
