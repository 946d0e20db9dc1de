"""The engine over int4: its tokens depend on no chunk, hit, preemption or batch, and are those of `generate`."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from covers import cover, pairs, values
from invariants import check_idle, check_scheduler
from tiny_models import hf_model, save

from pagedattn import plan_step
from pagedattn.cli import command as cli
from pagedattn.engine import LLM, EngineConfig, SamplingParams, SchedulerOutput
from pagedattn.engine.worker import decode_graphs, kv_memory
from pagedattn.engine.worker.runner import ModelRunner
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError
from pagedattn.integrations import transformers as hf

SIZE, NEW_TOKENS = 32, 35
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


class Axes(NamedTuple):
    """One point of the grid."""

    chunk: int  # 0 is whole prompts
    prefix: str
    pool: str
    batch: int
    graphs: bool  # on a CPU a graph is a plain call over the same buffers
    overlap: bool
    model: str

    def options(self, scarce: int) -> dict[str, Any]:
        """Of `LLM`, with so many blocks where requests are to be preempted."""
        return {
            "num_kv_blocks": scarce if self.pool in ("recompute", "swap") else 64,
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": 32 if self.chunk else 1024,
            "max_prefill_share": self.chunk / 32 if self.chunk else 1.0,
            "enable_prefix_caching": self.prefix != "off",
            "graph_sizes": (1, 3, 5) if self.graphs and self.model == "native" else None,
            "overlap": self.overlap,
            "preemption": "swap" if self.pool == "swap" else "recompute",
            "model_impl": self.model,
        }


# The cover has more of what comes first, which takes the fewest steps.
LEVELS: dict[str, tuple[Any, ...]] = {
    "chunk": (0, 32, 7, 1),
    "prefix": ("off", "on", "hot"),
    "pool": ("ample", "recompute", "swap", "few open"),
    "batch": (5, 1),
    "graphs": (False, True),
    "overlap": (False, True),
    "model": ("native", "transformers"),
}
GRID = [Axes(*point) for point in itertools.product(*LEVELS.values())]
COVER = [GRID[index] for index in cover([pairs(**axes._asdict()) for axes in GRID])]


def prompts() -> list[list[int]]:
    """Prompts that end before, at and behind the end of a block; the last two have two blocks in common."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 512, (count,), generator=generator).tolist()

    shared = draw(70)
    return [*(draw(n) for n in (14, 31, 32)), *(shared + draw(n) for n in (1, 27))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What `generate` of transformers gives over int4, a prompt at a time."""
    model = hf_model("qwen3", torch.float64, num_hidden_layers=2)
    hf.enable(model, kv_cache_dtype="int4")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts()]


def make(folder: Path, **options: Any) -> Any:
    given = {"device": "cpu", "dtype": "float64", "num_kv_blocks": 64, "log_interval": None, "kv_cache_dtype": "int4"}
    return LLM(folder, **{**given, **options})


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, progress=False)
    check_idle(llm)
    return [[*one.token_ids] for output in outputs for one in output.outputs]


@pytest.mark.cover(by=lambda axes: values(**axes._asdict()))
@pytest.mark.parametrize("axes", COVER, ids=str)
def test_pairs_of_axes(axes: Axes, folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    if axes.pool == "few open":
        monkeypatch.setattr(kv_memory, "_most_recent", lambda *_: 4)
    llm = make(folder, **axes.options(6))
    assert llm._scheduler.max_num_seqs == min(axes.batch, 3 if axes.pool == "few open" else 5)
    for _ in range(2 if axes.prefix == "hot" else 1):
        assert tokens(llm) == alone
    counters = llm.stats().counters
    if axes.pool in ("recompute", "swap") and axes.batch == 5 and axes.chunk != 1:
        assert counters.preemptions > 0 and (counters.swapped_in_blocks > 0) == (axes.pool == "swap")
    if axes.pool in ("ample", "few open"):
        assert counters.preemptions == 0
        assert (counters.cached_tokens > 0) or axes.prefix != "hot"
    assert counters.cached_tokens % SIZE == 0, "whole blocks"
    if axes.graphs and axes.model == "native":
        assert llm.runner._graphs.replays > 20


def test_the_cover_is_a_cover() -> None:
    assert len(COVER) < 24
    for (i, first), (j, second) in itertools.combinations(enumerate(LEVELS.values()), 2):
        assert {(point[i], point[j]) for point in COVER} == set(itertools.product(first, second))


def test_blocks_are_encoded(folder: Path, alone: list[list[int]]) -> None:
    """What makes the other tests tests: an exact cache has other tokens."""
    assert tokens_of_exact(folder) != alone


def tokens_of_exact(folder: Path) -> list[list[int]]:
    llm = LLM(folder, device="cpu", dtype="float64", num_kv_blocks=64, log_interval=None)
    return [[*output.token_ids] for output in llm.generate(prompts(), GREEDY, progress=False)]


def test_completions_fork_what_is_not_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the tokens that it has alone, whether the prompt leaves a block open or not."""
    copies: list[int] = []
    launch = ModelRunner.launch

    def counted(self: ModelRunner, step: SchedulerOutput) -> Any:
        copies.append(len(step.recent_copies))
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "launch", counted)
    sampled = partial(SamplingParams, temperature=1.0, max_tokens=34, ignore_eos=True)
    llm = make(folder)
    together = tokens(llm, sampled(seed=7, n=3))
    assert sum(copies) == 2 * 3, "of 5 prompts one ends with its block, and of one the last token begins another"
    for index in range(3):
        single = tokens(make(folder, enable_prefix_caching=False), sampled(seed=7 + index))
        assert together[index::3] == single


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_fail_leave_nothing_behind(
    folder: Path, alone: list[list[int]], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail half way through the layers, some of whose blocks are encoded already."""
    llm = make(folder, overlap=overlap, max_num_batched_tokens=40)
    layer, calls, failures = llm.runner.model.layers[1], itertools.count(), 0

    def fails(*arguments: Any) -> Any:
        if next(calls) % 5 == 3:
            raise CapacityError("out of memory")
        return type(layer).forward(layer, *arguments)

    monkeypatch.setattr(layer, "forward", fails)
    ids = {llm.add_request(prompt, GREEDY): index for index, prompt in enumerate(prompts())}
    found: dict[int, list[int]] = {}
    while llm.has_unfinished:
        try:
            found |= {ids[output.request_id]: [*output.token_ids] for output in llm.step()}
        except CapacityError:
            failures += 1
        check_scheduler(llm._scheduler)
    check_idle(llm)
    assert failures > 8 and [found[index] for index in range(len(found))] == alone


def test_aborts_give_both_pools_back(folder: Path, alone: list[list[int]]) -> None:
    llm = make(folder, max_num_batched_tokens=16, max_num_seqs=4)
    for turn in range(0, 40, 5):
        names = [llm.add_request(prompt, GREEDY) for prompt in prompts()]
        for _ in range(turn):
            llm.step()
        for name in names:
            llm.abort(name)
        while llm.has_unfinished:
            llm.step()
        check_idle(llm)
    assert tokens(llm) == alone


@pytest.mark.parametrize("name", ["int4", "int4:skip=0", "int4:skip=-1"])
def test_captured_steps_write_to_the_second_cache(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where metadata have tensors of their own, as on a GPU; those of layers that are skipped beside the others."""
    eager = tokens(make(folder, kv_cache_dtype=name))

    def with_own_tensors(layers: Any, common: Any, into: Any = None, capture: bool = False) -> Any:
        return plan_step(layers, common, into, capture=into is None)

    monkeypatch.setattr(decode_graphs, "plan_step", with_own_tensors)
    monkeypatch.setattr("pagedattn.backends.op_backend.check_capture", lambda *_: None)
    llm = make(folder, kv_cache_dtype=name, graph_sizes=(1, 4, 5))
    assert tokens(llm) == eager and llm.runner._graphs.replays > 20


def test_triton_has_the_tokens_of_torch(folder: Path) -> None:
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [tokens(make(folder, dtype="float32", backend=name), short) for name in ("TORCH", "TRITON")]
    assert found[0] == found[1]


def test_a_clean_cache_zeroes_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed out of the second cache holds nothing but what its request wrote."""
    execute, dirty = ModelRunner.execute, 0

    def checked(self: ModelRunner, step: SchedulerOutput) -> Any:
        nonlocal dirty
        out, recent = execute(self, step), self.cache.recent
        assert recent is not None
        rows = recent.slabs.view(torch.float64)
        for request, start, count, _ in step.scheduled:
            if end := (start + count) % SIZE:
                block = recent.layer(0).key[request.block_ids[-1][(start + count) // SIZE]]
                dirty += bool(block[end:].isnan().any())
        held = {block for item in step.scheduled for block in item.request.block_ids[-1]}
        rows[:, [block for block in range(1, recent.num_blocks) if block not in held]] = float("nan")
        return out

    monkeypatch.setattr(ModelRunner, "execute", checked)
    for clean in (True, False):
        dirty = 0
        tokens(make(folder, clean_cache=clean, max_num_seqs=1))
        assert (dirty == 0) == clean


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    model, text = str(Path(__file__).parents[2] / "examples" / "tiny-qwen3"), "A block table"
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = LLM(model, device="cpu", kv_cache_dtype="int4").generate(text, params, progress=False)[0].text
    options = ["--kv-cache-dtype", "int4", "--max-tokens", "40", "--device", "cpu"]
    assert cli.main(["generate", model, text, *options]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_options_that_do_not_go_with_it(folder: Path, tmp_path: Path) -> None:
    assert EngineConfig(model="m", kv_cache_dtype="int4").tokens_per_block == SIZE
    assert EngineConfig(model="m", kv_cache_dtype="int4", block_size=64).tokens_per_block == 64
    assert EngineConfig(model="m").tokens_per_block == 16
    with pytest.raises(
        InvalidInputError, match="block_size must be a multiple of 32 for kv_cache_dtype='int4', got 16"
    ):
        EngineConfig(model="m", kv_cache_dtype="int4", block_size=16)
    usual = EngineConfig(model="m", kv_cache_dtype="turboquant4")
    assert (usual.kv_cache_dtype, usual.tokens_per_block) == ("turboquant4:window=64", 32)
    none = EngineConfig(model="m", kv_cache_dtype="turboquant4:window=0")
    assert none.kv_cache_dtype == "turboquant4:window=0" == EngineConfig(**asdict(none)).kv_cache_dtype
    windows = save(hf_model("qwen2-half-window", torch.float32), tmp_path)
    for kind in ("native", "transformers"):
        with pytest.raises(UnsupportedError, match="kv_cache_dtype='int4' has one KV group, these layers are of 2"):
            make(windows, model_impl=kind)
