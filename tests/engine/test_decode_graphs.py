"""Steps of decodes in buffers of fixed sizes: padding disturbs nobody, and larger batches run eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner import Driver, greedy, make_runner
from tiny_models import hf_model, save

from pagedattn import StepMetadata, plan_step
from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.worker import decode_graphs
from pagedattn.engine.worker.decode_graphs import default_sizes
from pagedattn.engine.worker.runner import ModelRunner
from pagedattn.errors import InvalidInputError, UnsupportedError

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
    assert [common.block_size for common in graphs._steps[4].common_by_group] == runner._state.block_sizes
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


def calls_of(runner: ModelRunner) -> list[tuple[int, StepMetadata]]:
    """A list that gets the number of rows and the metadata of each run of the model."""
    calls: list[tuple[int, StepMetadata]] = []
    runner.model.register_forward_pre_hook(lambda _, args: calls.append((len(args[0]), args[3])))
    return calls


def test_a_batch_runs_in_the_smallest_size_that_holds_it(folder: Path) -> None:
    runner = make_runner(folder, graph_sizes=(1, 8, 2, 4))
    driver, calls = Driver(runner), calls_of(runner)
    requests = [driver.request(list(prompt)) for prompt in PROMPTS]
    driver.run([(one, len(one.token_ids)) for one in requests])
    calls.clear()
    for count in (1, 2, 3, 4, 5):
        driver.run([(one, 1) for one in requests[:count]])
    assert [size for size, _ in calls] == [1, 2, 4, 4, 8]


def test_a_prefix_is_read_once_where_that_saves_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks that three sequences share save 2 * 8 reads of a token; with two sequences it is half of that."""

    def reads_once(step: StepMetadata) -> bool:
        return any(metadata.common.shared_prefix_len > 0 for metadata in step.by_key.values())

    monkeypatch.setattr(StepMetadata, "shares_prefix", property(reads_once))  # as if every backend made use of it
    monkeypatch.setattr(decode_graphs, "_LEAST_READ_AGAIN", 16)
    runner = make_runner(folder, graph_sizes=(2, 4), block_size=4)
    driver, graphs, calls = Driver(runner), runner._graphs, calls_of(runner)
    assert graphs is not None and {*graphs._sharing} == {4}
    first, *others = (driver.request([*range(40, 48), end]) for end in (7, 8, 9))
    driver.run([(first, 9)])
    for other in others:
        other.block_ids = [table[:2] for table in first.block_ids]
        other.num_computed_tokens = 8
    driver.run([(other, 1) for other in others])
    calls.clear()
    for count in (3, 2, 1):
        driver.run([(one, 1) for one in (first, *others)[:count]])
    ran = [metadata for _, metadata in calls]
    assert ran[0] is graphs._sharing[4].metadata
    assert ran[1] is ran[2] is graphs._steps[2].metadata


def test_a_refusal_leaves_nothing_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two sizes the second is refused: steps of the first size run eagerly too."""

    def refuse_two(layers: Any, common_by_group: Any, **options: Any) -> StepMetadata:
        if common_by_group[0].num_seqs == 2 and "into" not in options:
            raise UnsupportedError("no graph of two")
        return plan_step(layers, common_by_group, **options)

    monkeypatch.setattr(decode_graphs, "plan_step", refuse_two)
    with caplog.at_level("WARNING", "pagedattn.engine"):
        runner = make_runner(folder, graph_sizes=(4, 2))
    assert "no graph of two" in caplog.text
    driver, graphs = Driver(runner), runner._graphs
    assert graphs is not None
    requests = [driver.request(list(prompt)) for prompt in PROMPTS[:4]]
    driver.run([(one, len(one.token_ids)) for one in requests])
    for count in (4, 2):
        driver.run([(one, 1) for one in requests[:count]])
    assert graphs.replays == 0 and [one.num_generated for one in requests] == [3, 3, 2, 2]


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
