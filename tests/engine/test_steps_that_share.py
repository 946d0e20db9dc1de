"""A step of decodes tells attention which blocks all of them share, as prefix caching makes them shared."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import hf_model, save

from pagedattn.engine import LLM, KVGroup, Request, SamplingParams, ScheduledRequest, SchedulerOutput
from pagedattn.engine.worker import decode_graphs
from pagedattn.engine.worker.device_batch import BatchSender
from pagedattn.engine.worker.host_batch import HostBatchBuilder
from pagedattn.engine.worker.persistent_batch import PersistentBatch
from pagedattn.kernels.decode import cascade
from pagedattn.testing import interpreted

ROWS = [[3, 4, 5, 6], [3, 4, 7, 8], [3, 4, 5, 9]]


def shared(rows: list[list[int]], lengths: list[int], groups: list[KVGroup], prompts: int = 0) -> list[int]:
    """What a packed step of one row of blocks per sequence, the same in each group, says is shared."""
    items = []
    for row, length in zip(rows, lengths, strict=True):
        request = Request("r", array("i", [1] * length), SamplingParams(), arrival=0, max_total_tokens=512)
        request.block_ids = [row for _ in groups]
        items.append(ScheduledRequest(request, length - 1, 1, True))
    device = torch.device("cpu")
    state = PersistentBatch(groups, 4, 512, device)
    packed = HostBatchBuilder(groups, state).pack(SchedulerOutput(tuple(items), len(items) - prompts, ()))
    common_by_group = BatchSender(state, device).send(packed).common_by_group
    return [common_by_group[group].shared_prefix_len for group in range(len(groups))]


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [
        (ROWS, [16, 16, 16], 8),
        (ROWS[::2], [16, 16], 12),
        (ROWS[::2], [16, 9], 8),
        (ROWS[:2], [7, 16], 4),
        (ROWS[:2], [3, 16], 0),
        ([ROWS[0], ROWS[1], ROWS[0]], [16, 16, 16], 8),
        ([ROWS[0], [9, 4, 5, 6], ROWS[0]], [16, 16, 16], 0),
        ([ROWS[0], [9, 4, 5, 6]], [16, 16], 0),
        ([ROWS[0], [3, 9, 5, 6]], [16, 16], 4),
        ([ROWS[0], ROWS[0]], [16, 16], 16),
        (ROWS[:1], [16], 0),
    ],
)
def test_the_run_of_blocks_that_all_rows_begin_with(rows: list[list[int]], lengths: list[int], expected: int) -> None:
    assert shared(rows, lengths, [KVGroup(4)]) == [expected]


def test_only_of_decodes_and_not_behind_a_window() -> None:
    groups = [KVGroup(4), KVGroup(4, sliding_window=9), KVGroup(4)]
    assert shared(ROWS, [16, 16, 16], groups) == [8, 0, 8]
    assert shared(ROWS, [16, 16, 16], groups, prompts=1) == [0, 0, 0]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(prompt) :]


@pytest.mark.skipif(not interpreted(), reason="TRITON serves the CPU only when interpreted")
@pytest.mark.parametrize(
    ("name", "graph_sizes"),
    [("qwen2-half-window", None), ("qwen3", (2, 4)), ("qwen2-half-window", (2, 4))],
    ids=["eager", "captured", "captured, windows"],
)
def test_prompts_that_begin_alike_have_the_tokens_of_transformers(
    name: str, graph_sizes: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "SAVED_BYTES", -(1 << 62))
    monkeypatch.setattr(decode_graphs, "_LEAST_READ_AGAIN", 1)
    lengths, shared = [], cascade.CascadeMetadata
    say = shared.set_length
    monkeypatch.setattr(shared, "set_length", lambda *args: (lengths.append(args[-1]), say(*args))[1])
    reference = hf_model(name, torch.float32)
    prompts = [[*range(40, 52), *end] for end in ([7], [9, 200, 17], [11] * 6)]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "backend": "TRITON", "block_size": 4}
    llm = LLM(str(save(reference, tmp_path)), num_kv_blocks=160, max_model_len=24, graph_sizes=graph_sizes, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(prompts[:1], sampling)
    lengths.clear()
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        assert list(output.outputs[0].token_ids) == greedy(reference, prompt, 4)
    assert lengths and {*lengths} == {12}
    graphs = llm.runner._graphs  # type: ignore[attr-defined]
    assert (graphs is None) == (graph_sizes is None) and (graphs is None or graphs.replays > len(lengths))
